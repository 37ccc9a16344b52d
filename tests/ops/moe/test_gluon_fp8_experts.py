"""FP8 products of many pairs of each expert, on a Hopper GPU or emulated: values, blocks and barriers."""

# ruff: noqa: E402 (the imports need a version of Triton)
from __future__ import annotations

import pytest
import torch
from torch import Tensor

from weft.platforms.triton_version import is_known

triton = pytest.importorskip("triton")
if not is_known(triton.__version__):
    pytest.skip("the kernels are for versions of Triton that Weft knows", allow_module_level=True)

from tests.ops.gluon_emulator import Emulator
from tests.ops.interpreter import DEVICE
from tests.ops.linear.test_triton_fp8 import block_of, fp8_matrix, product
from tests.ops.moe.test_triton_fp8_moe import check_moe
from tests.ops.moe.test_triton_moe import routing
from weft.ops.fp8 import Fp8Matrix, quantize_inputs_reference
from weft.ops.fp8.quantize import no_pass, prepare_pass
from weft.ops.moe import NO_EXTRAS, ExpertExtras
from weft.ops.moe import fp8_experts_hopper as hopper
from weft.ops.moe.fp8_experts import LARGE, Hopper, choose_config, fp8_fused_moe_triton
from weft.ops.moe.groups import group_many
from weft.ops.triton.launch import launches_handled

ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
SCHEMES = ["token", "static", "block"]
COUNTS = [(3, 0, 5), (130, 0, 64, 65, 1), pytest.param((300, 1000, 0, 17, 129, 128), marks=pytest.mark.gpu)]
"""Pairs of each expert. The blocks are whole, at most half full, or have one pair more. Some experts have no pairs."""


def depth_of(counts: tuple[int, ...]) -> int:
    """More inner elements than a ring of stages holds, or for few pairs a single stage."""
    return 128 if sum(counts) < 10 else 896


def counted(counts: tuple[int, ...], top_k: int) -> Tensor:
    """``[T, top_k]`` ids: expert e has ``counts[e]`` pairs, in random order; the last token has none."""
    ids = torch.cat([torch.full((count,), expert, dtype=torch.int32) for expert, count in enumerate(counts)])
    ids = torch.cat([ids[torch.randperm(len(ids))], torch.full((top_k,), -1, dtype=torch.int32)])
    return ids.view(-1, top_k).to(DEVICE)


def multiply(
    inputs: tuple[Tensor, Tensor], matrix: Fp8Matrix, out: Tensor, ids: Tensor, monkeypatch: pytest.MonkeyPatch
) -> tuple[Tensor, Tensor]:
    """Run the product, emulated by fewer programs than there are tiles. Returns the pairs by place, and where each
    expert's begin. ``conftest.py`` fills new memory with NaN."""
    grouping, _blocks = group_many(ids, len(matrix.weight), hopper.ROWS, no_pass(ids))
    if ON_HOPPER:
        hopper.experts_hopper_product(inputs, matrix, out, grouping, ids.shape[1])
    else:
        monkeypatch.setattr(hopper, "MULTIPROCESSORS", 2)
        emulator = Emulator()
        with launches_handled(emulator.handle):
            hopper.experts_hopper_product(inputs, matrix, out, grouping, ids.shape[1])
        assert len(emulator.waited) == 2 and all(emulator.used_barriers)
    return grouping[0], grouping[1]


def quantised(rows: int, width: int, scheme: str) -> tuple[Tensor, Tensor, Tensor | None]:
    """Values, scales as the pass leaves them, and a static scale or None."""
    x = torch.randn(rows, width, device=DEVICE).bfloat16()
    static = torch.tensor([0.013], device=DEVICE) if scheme == "static" else None
    work = prepare_pass(x, static, block=block_of(scheme))
    values, scales = quantize_inputs_reference(x, static, block=block_of(scheme))
    work.outputs[0].copy_(values)
    if static is None:
        work.outputs[1].copy_(scales)
    return *work.outputs, static


def check(out: Tensor, want: Tensor) -> None:
    error = ((out.double() - want).norm(dim=1) / want.norm(dim=1)).max()
    assert error < 6e-3, f"relative error of a row {error:.2e}"


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_up_product(scheme: str, counts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """One token has no experts. There are fewer programs than tiles, and two tiles across."""
    top_k, hidden, block = 2 if sum(counts) % 2 == 0 else 1, depth_of(counts), block_of(scheme)
    ids, width = counted(counts, top_k), 2 * hopper.columns_of(block, gated=True)
    values, scales, static = quantised(len(ids), hidden, scheme)
    matrix = Fp8Matrix(*fp8_matrix(2 * width, hidden, block, len(counts)), static, block)
    out = torch.empty(ids.numel(), width, dtype=torch.bfloat16, device=DEVICE)
    pairs, first_place = multiply((values, scales), matrix, out, ids, monkeypatch)
    for expert, count in enumerate(counts):
        first = int(first_place[expert])
        tokens = pairs[first : first + count].long() // top_k
        rows = scales if static is not None else scales[tokens]
        both = product(values[tokens], rows, matrix.weight[expert], matrix.scale[expert], block)
        gate, up = both.chunk(2, dim=-1)
        if count:
            check(out[first : first + count], torch.nn.functional.silu(gate) * up)
    assert out[sum(counts) :].isnan().all(), "places without a pair are not written"


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_down_product(scheme: str, counts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs by place, outputs by pair."""
    top_k, width, block = 2 if sum(counts) % 2 == 0 else 1, depth_of(counts), block_of(scheme)
    ids, hidden = counted(counts, top_k), 2 * hopper.columns_of(block, gated=False)
    values, scales, static = quantised(ids.numel(), width, scheme)
    matrix = Fp8Matrix(*fp8_matrix(hidden, width, block, len(counts)), static, block)
    out = torch.empty(ids.numel(), hidden, dtype=torch.bfloat16, device=DEVICE)
    pairs, first_place = multiply((values, scales), matrix, out, ids, monkeypatch)
    for expert, count in enumerate(counts):
        if count:
            places = slice(int(first_place[expert]), int(first_place[expert]) + count)
            rows = scales if static is not None else scales[places]
            want = product(values[places], rows, matrix.weight[expert], matrix.scale[expert], block)
            check(out[pairs[places].long()], want)
    assert out[ids.flatten() < 0].isnan().all(), "pairs without an expert are not written"


def test_no_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding alone: nothing is written, and nothing outside the table of blocks is read."""
    ids = torch.full((300, 1), -1, dtype=torch.int32, device=DEVICE)
    values, scales, _static = quantised(300, 128, "token")
    matrix, out = Fp8Matrix(*fp8_matrix(128, 128, 0, 3), None, 0), torch.empty(300, 128, device=DEVICE).bfloat16()
    out.fill_(torch.nan)
    grouping, _blocks = group_many(ids, 3, hopper.ROWS, no_pass(ids))
    emulator = Emulator()
    if ON_HOPPER:
        hopper.experts_hopper_product((values, scales), matrix, out, grouping, 1)
    else:
        with launches_handled(emulator.handle):
            hopper.experts_hopper_product((values, scales), matrix, out, grouping, 1)
    assert out.isnan().all()


@pytest.mark.gpu
@pytest.mark.skipif(not ON_HOPPER, reason="the kernel is for Hopper")
@pytest.mark.parametrize("scheme", SCHEMES)
def test_same_bits_as_tiles(scheme: str) -> None:
    """The whole operation. Both add sums of 128 products in order."""
    num_tokens, num_experts, hidden, width, block = 700, 6, 1024, 384, block_of(scheme)
    weights, ids = routing(num_tokens, num_experts, 3, 5)
    x = torch.randn(num_tokens, hidden, device=DEVICE).bfloat16()
    statics = [torch.tensor([s], device=DEVICE) if scheme == "static" else None for s in (0.013, 0.02)]
    matrices = [
        Fp8Matrix(*fp8_matrix(*size, block, num_experts), static, block)
        for size, static in zip(((2 * width, hidden), (hidden, width)), statics, strict=True)
    ]
    got, want = (fp8_fused_moe_triton(x, *matrices, weights, ids, config=config) for config in (Hopper.BLOCKS, LARGE))
    assert want[: num_tokens - 5].any(1).all() and torch.equal(got, want)


@pytest.mark.gpu
@pytest.mark.skipif(not ON_HOPPER, reason="the kernel is for Hopper")
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(("num_tokens", "width"), [(20, 768), (300, 768), (300, 1792)], ids=str)
def test_experts_of_published_widths_equal_float64(num_tokens: int, width: int, scheme: str) -> None:
    """Experts of Qwen3-30B-A3B and of LFM2-8B-A1B, with few and with many pairs."""
    check_moe((num_tokens, 16, 4, 2048, width), scheme, torch.bfloat16, 1, Hopper.BLOCKS)


@pytest.mark.skipif(ON_HOPPER, reason="which kernels are chosen is asked without launching any")
def test_only_many_pairs_of_whole_tiles_go_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper, "runs_gluon", lambda device: True)

    def takes(
        tokens: int, block: int = 0, hidden: int = 256, width: int = 384, dtype: torch.dtype = torch.bfloat16
    ) -> bool:
        return choose_config(torch.empty(128, hidden, width), tokens, 8, block, dtype) is Hopper.BLOCKS

    assert takes(257) and not takes(256), "16 pairs of 128 experts and 8 experts of a token are 256 tokens"
    assert takes(513, 128, width=640) and not takes(512, 128, width=640), "32 pairs with scales by block"
    assert takes(769, 128, width=512) and not takes(768, 128, width=512), "48 pairs of experts of at most 512"
    assert not takes(1000, 128, hidden=384), "tiles have 256 outputs with scales by block"
    assert not takes(257, hidden=320) and not takes(257, width=448) and not takes(257, dtype=torch.float16)


@pytest.mark.skipif(ON_HOPPER, reason="which kernels are chosen is asked without launching any")
@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_operation_uses_it_for_both_products_of_swiglu(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper, "runs_gluon", lambda device: True)
    weights, ids = routing(100, 2, 2, 0)
    static, block = torch.ones(1) if scheme == "static" else None, block_of(scheme)
    up, down = (Fp8Matrix(*fp8_matrix(256, inner, block, 2), static, block) for inner in (256, 128))

    def launched(extras: ExpertExtras) -> int:
        names: list[str] = []
        with launches_handled(lambda kernel, *launch: names.append(kernel.fn.__name__)):
            fp8_fused_moe_triton(torch.zeros(100, 256).bfloat16(), up, down, weights, ids, extras=extras)
        return names.count("_fp8_experts_hopper_kernel")

    assert launched(NO_EXTRAS) == 2 and launched(ExpertExtras(limit=7.0)) == 0
