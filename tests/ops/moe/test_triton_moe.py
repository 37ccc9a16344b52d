"""Router and expert kernels against float64, on the GPU or under the interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.ops.interpreter import DEVICE
from tests.whole import covering
from weft.ops.moe import ExpertExtras, Routed, RoutingRule, clamped_swiglu, fused_moe, softcapped_swiglu, topk_router
from weft.ops.moe import combine as moe_sum
from weft.ops.moe import groups as moe_groups
from weft.ops.moe.blocks import Tile, Tiles
from weft.ops.moe.experts import fused_moe_triton, moe_tiles
from weft.ops.moe.groups import FEW_PAIRS, group_pairs
from weft.ops.moe.router import topk_router_triton

ON_GPU = DEVICE == "cuda"
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
DTYPES = list(TOLERANCE) if ON_GPU else [torch.float32]

CLAMPED = {"alpha": 1.7, "limit": 0.9, "up_offset": 0.25}

# tokens, experts, experts per token, hidden size, expert width
SHAPES = [(1, 8, 2, 48, 24), (2, 8, 2, 64, 32), (7, 5, 3, 40, 16), (33, 16, 4, 64, 32), (65, 4, 2, 32, 40)]
if ON_GPU:
    SHAPES += [(1, 512, 10, 2048, 512), (8, 512, 10, 2048, 128), (130, 128, 8, 512, 192), (1000, 16, 4, 256, 96)]


def routing(num_tokens: int, num_experts: int, top_k: int, padding: int) -> tuple[Tensor, Tensor]:
    ids = torch.stack([torch.randperm(num_experts)[:top_k] for _ in range(num_tokens)]).int()
    ids[num_tokens - padding :] = -1
    return torch.rand(num_tokens, top_k, device=DEVICE), ids.to(DEVICE)


def expected_moe(
    x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, ids: Tensor, biases: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """Pair by pair, in float64; with biases, the clamped activation of gpt-oss."""
    x, weights = x.double(), weights.double()
    out = torch.zeros_like(x)
    for expert in ids.unique().tolist():
        if expert >= 0:
            rows, places = (ids == expert).nonzero(as_tuple=True)
            hidden = x[rows] @ gate_up[expert].double().T
            if biases is not None:
                hidden = clamped_swiglu(hidden + biases[0][expert].double(), **CLAMPED)
            elif hidden.shape[1] == down.shape[2]:
                hidden = hidden.relu().square()
            else:
                gate, up = hidden.chunk(2, dim=-1)
                hidden = torch.nn.functional.silu(gate) * up
            made = hidden @ down[expert].double().T
            made = made if biases is None else made + biases[1][expert].double()
            out.index_add_(0, rows, weights[rows, places, None] * made)
    return out


def check_moe(
    shape: tuple[int, ...], dtype: torch.dtype, padding: int, tiles: Tiles | None = None, *, gated: bool = True
) -> None:
    num_tokens, num_experts, top_k, hidden, width = shape
    weights, ids = routing(num_tokens, num_experts, top_k, padding)
    x = torch.randn(num_tokens, hidden, device=DEVICE).to(dtype)
    gate_up = (torch.randn(num_experts, (1 + gated) * width, hidden, device=DEVICE) / hidden**0.5).to(dtype)
    down = (torch.randn(num_experts, hidden, width, device=DEVICE) / width**0.5).to(dtype)
    want = expected_moe(x, gate_up, down, weights, ids)
    x[num_tokens - padding :] = torch.nan
    out = fused_moe_triton(x, gate_up, down, weights, ids, tiles=tiles)
    assert (out[num_tokens - padding :] == 0).all(), "tokens without experts are zero"
    real = slice(num_tokens - padding)
    assert (out[real].double() - want[real]).norm() <= TOLERANCE[dtype] * want[real].norm()


@pytest.mark.parametrize(("shape", "dtype", "padding"), covering(SHAPES, DTYPES, [0, 1], of=1))
def test_equals_pair_by_pair(shape: tuple[int, ...], dtype: torch.dtype, padding: int) -> None:
    check_moe(shape, dtype, padding)


@pytest.mark.parametrize(
    ("num_tokens", "many"),
    [(4, 0), (FEW_PAIRS // 2, 0), (FEW_PAIRS // 2 + 3, 10**6), (FEW_PAIRS // 2 + 3, 0)],
    ids=["4", "few", "more", "many"],
)
def test_groups(num_tokens: int, many: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every pair is in one block, of its expert; a block has up to 16 pairs, and the kernels look at all blocks."""
    monkeypatch.setattr(moe_groups, "MANY_PAIRS", many)
    ids = torch.randint(-1, 7, (num_tokens, 2), dtype=torch.int32, device=DEVICE)
    (pairs, first_place, block_expert, block_first, num_blocks), max_blocks = group_pairs(ids, 8, 16)
    assert num_blocks[0] <= max_blocks
    found = torch.full_like(ids.flatten(), -1)
    for block in range(int(num_blocks[0])):
        expert, first = int(block_expert[block]), int(block_first[block])
        if expert >= 0:
            end = min(first + 16, int(first_place[expert + 1]))
            assert first < end and (found[pairs[first:end]] == -1).all()
            found[pairs[first:end]] = expert
    assert torch.equal(found, ids.flatten())


@pytest.mark.parametrize("num_tokens", [2, 90])
def test_squared_relu_without_a_gate(num_tokens: int) -> None:
    for dtype in DTYPES:
        check_moe((num_tokens, 3, 2, 40, 20), dtype, 1, gated=False)


def test_softcapped_activation() -> None:
    """Values far beyond the caps, and near zero; by hand."""
    gate, up = torch.linspace(-40.0, 40.0, 81).double(), torch.linspace(200.0, -200.0, 81).double()
    want = 4.0 * (gate / 4.0).tanh() * gate.sigmoid() * 25.0 * (up / 25.0).tanh()
    got = softcapped_swiglu(torch.cat([gate, up]).float(), 4.0, 25.0)
    torch.testing.assert_close(got, want.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_tokens", [2, 90])
def test_softcapped_experts(num_tokens: int) -> None:
    for dtype in DTYPES:
        weights, ids = routing(num_tokens, 3, 2, 1)
        shapes = (num_tokens, 40), (3, 40, 40), (3, 40, 20)
        x, gate_up, down = (torch.randn(s, device=DEVICE).to(dtype) for s in shapes)
        extras = ExpertExtras(gate_cap=2.0, up_cap=3.0)
        want = torch.zeros(num_tokens, 40, dtype=torch.float64, device=DEVICE)
        for row, place in (ids >= 0).nonzero().tolist():
            gate, up = (x[row].double() @ gate_up[ids[row, place]].double().T).chunk(2)
            hidden = 2.0 * (gate / 2.0).tanh() * gate.sigmoid() * 3.0 * (up / 3.0).tanh()
            want[row] += weights[row, place].double() * (down[ids[row, place]].double() @ hidden)
        for run in (fused_moe_triton, fused_moe.reference):
            out = run(x, gate_up, down, weights, ids, extras=extras)
            assert (out.double() - want).norm() <= TOLERANCE[dtype] * want.norm()


@pytest.mark.parametrize("num_tokens", [2, 90])
def test_biases_and_the_clamped_activation(num_tokens: int) -> None:
    """In every block, few tokens and many, halves of tall tiles included; and as in the torch reference."""
    for dtype in DTYPES:
        weights, ids = routing(num_tokens, 3, 2, 1)
        x, gate_up, down, *biases = (
            torch.randn(s, device=DEVICE).to(dtype)
            for s in ((num_tokens, 40), (3, 40, 40), (3, 40, 20), (3, 40), (3, 40))
        )
        want = expected_moe(x, gate_up, down, weights, ids, (biases[0], biases[1]))
        extras = ExpertExtras(biases[0], biases[1], **CLAMPED)
        tall = Tiles(Tile(128, 16, 16, 4, 2), Tile(128, 16, 16, 4, 2))
        for tiles in (None, tall):
            out = fused_moe_triton(x, gate_up, down, weights, ids, extras=extras, tiles=tiles)
            assert (out.double() - want).norm() <= TOLERANCE[dtype] * want.norm()
        reference = fused_moe.reference(x, gate_up, down, weights, ids, extras=extras)
        assert (reference.double() - want).norm() <= TOLERANCE[dtype] * want.norm()


@pytest.mark.parametrize(
    ("pairs", "width"),
    [
        (1280, 512),
        (10240, 512),
        (20480, 512),
        (81920, 512),
        (10, 256),
        (1280, 256),
        *((n * 10240, 128) for n in (1, 2, 8)),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_tile(pairs: int, width: int, dtype: torch.dtype) -> None:
    """Each set of tiles that any number of tokens selects, on a problem with ragged edges."""
    tiles = moe_tiles(pairs, 512, torch.finfo(dtype).bits // 8, width)
    check_moe((300, 3, 2, 520, 200) if ON_GPU else (40, 3, 2, 40, 20), dtype, 3, tiles)


@pytest.mark.parametrize(
    ("rows", "hidden", "width"), [(rows, *sizes) for rows, sizes in covering([16, 128], [(64, 32), (80, 20)], of=1)]
)
def test_down_product_through_tiles_of_columns(rows: int, hidden: int, width: int) -> None:
    tiles = Tiles(Tile(rows, 16, 16, 4, 2), Tile(rows, 16, 16, 4, 2, span=2))
    check_moe((70, 3, 2, hidden, width), DTYPES[-1], 3, tiles)


@pytest.mark.parametrize("num_tokens", [50, 64, 65, 130, 210])
def test_blocks_that_are_at_most_half_full(num_tokens: int) -> None:
    """Tall tiles end in a tile of half the rows, in a full one, or exactly at a boundary."""
    check_moe((num_tokens, 1, 1, 32, 16), torch.float32, 0, Tiles(Tile(128, 16, 16, 4, 2), Tile(128, 16, 16, 4, 2)))


def test_all_tokens_to_one_expert() -> None:
    x, gate_up, down = torch.randn(50, 32), torch.randn(9, 32, 32) / 6, torch.randn(9, 32, 16) / 4
    weights, ids = torch.rand(50, 1), torch.full((50, 1), 8, dtype=torch.int32)
    inputs = [t.to(DEVICE) for t in (x, gate_up, down, weights, ids)]
    out = fused_moe_triton(*inputs, tiles=Tiles(Tile(16, 16, 16, 4, 2), Tile(16, 16, 16, 4, 2)))
    want = expected_moe(*inputs)
    assert (out - want).norm() < 2e-6 * want.norm()


def test_runs_agree_bit_for_bit() -> None:
    """The order of an expert's pairs may differ from run to run; the results may not."""
    weights, ids = routing(40, 6, 2, 0)
    x, gate_up, down = (torch.randn(s, device=DEVICE) for s in ((40, 32), (6, 32, 32), (6, 32, 16)))
    first = fused_moe_triton(x, gate_up, down, weights, ids)
    for _ in range(20 if ON_GPU else 1):
        assert torch.equal(fused_moe_triton(x, gate_up, down, weights, ids), first)


def test_shared_expert_is_gated_and_added() -> None:
    weights, ids = routing(5, 4, 2, 1)
    x, gate_up, down = (torch.randn(s, device=DEVICE) for s in ((5, 32), (4, 32, 32), (4, 32, 16)))
    shared, logits = torch.randn(5, 32, device=DEVICE), torch.randn(5, 9, device=DEVICE)
    plain = fused_moe_triton(x, gate_up, down, weights, ids)
    out = fused_moe_triton(x, gate_up, down, weights, ids, shared=shared, shared_gate=logits[:, 8:])
    torch.testing.assert_close(out, plain + torch.sigmoid(logits[:, 8:]) * shared)
    out = fused_moe_triton(x, gate_up, down, weights, ids, shared=shared)
    torch.testing.assert_close(out, plain + shared)


@pytest.mark.parametrize("tile", [*moe_sum.TILES.values(), moe_sum.Tile(32, 1, None)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_shared", [False, True])
def test_sum_of_experts(tile: moe_sum.Tile, dtype: torch.dtype, with_shared: bool) -> None:
    """Outputs of pairs without an expert may be anything, and no tile changes a bit."""
    weights, ids = routing(7, 5, 3, 1)
    ids[2, 1] = -1
    partial, shared = (torch.randn(n, 100, device=DEVICE).to(dtype) for n in (21, 7))
    partial[(ids < 0).flatten()] = torch.nan
    logits = torch.randn(7, 3, device=DEVICE).to(dtype)[:, 1:2]
    routed = Routed(weights, ids, shared, logits) if with_shared else Routed(weights, ids)
    out = moe_sum.sum_experts(partial, routed, tile=tile)
    want = (partial.nan_to_num().double().view(7, 3, -1) * weights.double().unsqueeze(-1)).sum(1)
    want += (torch.sigmoid(logits.double()) * shared.double()) if with_shared else 0.0
    assert (out.double() - want).norm() <= TOLERANCE[dtype] * want.norm()
    assert torch.equal(out, moe_sum.sum_experts(partial, routed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("shape", "on_device"), [((1, 8, 2), True), ((7, 60, 4), False), ((3, 512, 10), True)])
@pytest.mark.parametrize("renormalize", [False, True])
def test_router(shape: tuple[int, int, int], renormalize: bool, on_device: bool, dtype: torch.dtype) -> None:
    """Equal logits, of which there are many in two bytes, in the order of their ids."""
    num_tokens, num_experts, top_k = shape
    logits = torch.randn(num_tokens + 2, num_experts + 1, device=DEVICE).to(dtype)[:, :num_experts]
    count = torch.tensor([num_tokens], dtype=torch.int32, device=DEVICE) if on_device else num_tokens
    weights, ids = topk_router_triton(logits, top_k, renormalize=renormalize, num_tokens=count)
    want_ids = logits[:num_tokens].sort(dim=-1, descending=True, stable=True)[1][:, :top_k]
    want = logits[:num_tokens].double().softmax(-1).gather(1, want_ids)
    want = want / want.sum(-1, keepdim=True) if renormalize else want
    assert torch.equal(ids[:num_tokens].long(), want_ids)
    torch.testing.assert_close(weights[:num_tokens].double(), want, rtol=1e-5, atol=1e-8)
    assert (ids[num_tokens:] == -1).all() and (weights[num_tokens:] == 0).all()


def test_router_of_a_rank_with_whole_experts() -> None:
    """Ids count from the rank's first expert; those of other ranks are -1. Weights are those of all experts."""
    logits = torch.randn(5, 12, device=DEVICE)
    whole = topk_router_triton(logits, 4, renormalize=True, num_tokens=4)
    here = topk_router_triton(logits, 4, renormalize=True, num_tokens=4, first_expert=4, num_experts=4)
    local = whole[1] - 4
    assert torch.equal(here[1], local.masked_fill((local < 0) | (local >= 4), -1)) and torch.equal(here[0], whole[0])
    reference = topk_router.reference(logits, 4, renormalize=True, num_tokens=4, first_expert=4, num_experts=4)
    assert torch.equal(reference[1], here[1])
    torch.testing.assert_close(reference[0], here[0])


@pytest.mark.parametrize("gated", [False, True])
def test_routers_add_the_shared_expert(gated: bool) -> None:
    """Behind the experts that are here; its weight is neither renormalised nor scaled; padding meets it neither."""
    rows = torch.randn(5, 13, device=DEVICE)
    logits, gate = rows[:, :12], rows[:, 12:] if gated else None
    local = {"num_tokens": 4, "first_expert": 4, "num_experts": 4, "renormalize": True}
    sigmoid = RoutingRule(sigmoid=True, epsilon=1e-3, scale=2.5)
    for route in (
        lambda **more: topk_router_triton(logits, 3, **local, **more),
        lambda **more: topk_router.reference(logits, 3, **local, **more),
        lambda **more: topk_router_triton(logits, 3, rule=sigmoid, **local, **more),
        lambda **more: topk_router.reference(logits, 3, rule=sigmoid, **local, **more),
    ):
        without, (weights, ids) = route(), route(shared_expert=True, shared_gate=gate)
        assert torch.equal(weights[:, :3], without[0]) and torch.equal(ids[:, :3], without[1])
        assert ids.dtype == torch.int32 and ids[:, 3].tolist() == [4, 4, 4, 4, -1]
        want = torch.ones(4, device=DEVICE) if gate is None else gate[:4, 0].sigmoid()
        torch.testing.assert_close(weights[:4, 3], want)
        assert weights[4, 3] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_router_takes_the_lower_id_of_equals(dtype: torch.dtype) -> None:
    rows = [[-0.0, 1.0, 1.0, 0.0, 1.0, -1e-30], [-torch.inf, 1e38, 1.0, -1e38, -torch.inf, -1.0]]
    logits = torch.tensor(rows, device=DEVICE).to(dtype)
    _, ids = topk_router_triton(logits, 6, renormalize=True, num_tokens=2)
    assert ids.tolist() == [[1, 2, 4, 0, 3, 5], [1, 2, 5, 3, 0, 4]]


@pytest.mark.parametrize(
    ("num_experts", "top_k", "groups", "biased"),
    [
        (5, 2, (1, 1), True),
        (12, 3, (4, 2), True),
        (12, 4, (6, 3), False),
        (7, 7, (1, 1), False),
        (4, 2, (4, 2), True),
        (160, 6, (8, 3), False),
        (15, 4, (5, 2), True),
        (64, 8, (8, 4), True),
    ],
)
def test_sigmoid_router(num_experts: int, top_k: int, groups: tuple[int, int], biased: bool) -> None:
    logits = torch.randn(9, num_experts + 3, device=DEVICE)[:, :num_experts]
    bias = torch.randn(num_experts, device=DEVICE) if biased else None
    count = torch.tensor([7], dtype=torch.int32, device=DEVICE)
    rule = RoutingRule(True, bias, 1e-3, 2.5, *groups)
    for renormalize, num_tokens, local in ((True, 7, {}), (False, count, {"first_expert": 1, "num_experts": 2})):
        options = {"rule": rule, **local, "renormalize": renormalize, "num_tokens": num_tokens}
        want = topk_router.reference(logits, top_k, **options)
        got = topk_router_triton(logits, top_k, **options)
        assert torch.equal(got[1], want[1])
        torch.testing.assert_close(got[0], want[0], rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(("num_experts", "top_k"), [(16, 1), (5, 1), (7, 3)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_softmax_router_with_a_bias(num_experts: int, top_k: int, dtype: torch.dtype) -> None:
    """The bias affects choices, not weights. The last class has no expert here."""
    same = torch.Generator().manual_seed(0)  # on every device: the numbers show all three kinds of choices
    logits = (3 * torch.randn(9, num_experts + 1, generator=same) + 100).to(DEVICE, dtype)
    bias = (torch.rand(num_experts + 1, generator=same) - 0.5).to(DEVICE)
    bias[-1] = 0.6
    options = {"renormalize": False, "num_tokens": 8, "num_experts": num_experts}
    rule = RoutingRule(bias=bias)
    want, got = (route(logits, top_k, **options, rule=rule) for route in (topk_router.reference, topk_router_triton))
    probabilities = torch.softmax(logits.float(), -1)
    chosen = (probabilities + bias).argsort(-1, descending=True)[:8, :top_k]
    assert torch.equal(got[1][:8].long(), chosen.where(chosen < num_experts, -1)) and torch.equal(got[1], want[1])
    assert (got[1][:8] == -1).any() and (got[1][:8] >= 0).any() and not torch.equal(chosen[:, 0], logits[:8].argmax(-1))
    torch.testing.assert_close(got[0][:8], probabilities[:8].gather(1, chosen))
    torch.testing.assert_close(got[0], want[0])


@pytest.mark.parametrize(("num_experts", "top_k", "always"), [(7, 2, 2), (9, 4, 1), (6, 3, 3)])
def test_sigmoid_router_with_experts_of_every_token(num_experts: int, top_k: int, always: int) -> None:
    """They have the last ids, no bias, and a share of the sum; by hand, and in both implementations."""
    logits, bias = torch.randn(5, num_experts, device=DEVICE), torch.randn(num_experts - always, device=DEVICE)
    rule = RoutingRule(True, bias, 0.0, 2.5, num_always=always)
    scores = logits.sigmoid()
    ids = (scores[:, : num_experts - always] + bias).topk(top_k, dim=1)[1]
    last = torch.arange(num_experts - always, num_experts, device=DEVICE).expand(5, -1)
    ids = torch.cat([ids, last], dim=1)
    weights = scores.gather(1, ids)
    weights = 2.5 * weights / weights.sum(1, keepdim=True)
    for router in (topk_router.reference, topk_router_triton):
        got, found = router(logits, top_k, renormalize=True, num_tokens=4, rule=rule)
        assert torch.equal(found[:4], ids[:4].int()) and (found[4] == -1).all() and (got[4] == 0).all()
        torch.testing.assert_close(got[:4], weights[:4], rtol=2e-6, atol=2e-6)
        _, here = router(
            logits, top_k, renormalize=True, num_tokens=4, rule=rule, first_expert=num_experts - 3, num_experts=3
        )
        local = ids[:4].int() - (num_experts - 3)
        assert torch.equal(here[:4], local.masked_fill(local < 0, -1))


def test_sigmoid_router_keeps_to_the_best_groups() -> None:
    """The best expert of all stands in a group whose second is poor."""
    scores = torch.tensor([[0.9, 0.1, 0.6, 0.5, 0.2, 0.2]], device=DEVICE)
    rule = RoutingRule(sigmoid=True, num_groups=3, top_groups=1)
    for router in (topk_router.reference, topk_router_triton):
        _, ids = router(scores.logit(), 2, renormalize=False, num_tokens=1, rule=rule)
        assert ids.tolist() == [[2, 3]]


def test_sigmoid_router_takes_the_first_of_equal_groups() -> None:
    """Five groups of three: the last four are equal, and two are taken."""
    scores = torch.full((1, 15), 0.5, device=DEVICE)
    scores[0, :3] = 0.25
    rule = RoutingRule(sigmoid=True, num_groups=5, top_groups=2)
    _, ids = topk_router_triton(scores.logit(), 6, renormalize=False, num_tokens=1, rule=rule)
    assert ids.tolist() == [[3, 4, 5, 6, 7, 8]]
