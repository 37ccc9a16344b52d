"""Chunks of Kimi Delta Attention on a Hopper GPU or emulated, against float64."""

# ruff: noqa: E402 (the imports need a version of Triton)
from __future__ import annotations

import pytest
import torch
from torch import Tensor

from weft.platforms.triton_version import is_known

triton = pytest.importorskip("triton")
if not is_known(triton.__version__):
    pytest.skip("the kernel is for versions of Triton that Weft knows", allow_module_level=True)

from tests.ops.gluon_emulator import Emulator
from tests.ops.interpreter import DEVICE
from weft.config.gated_delta_net import L2_EPS
from weft.forward_context import ChunkTable
from weft.ops.delta_rule import kda_prefill as kda
from weft.ops.delta_rule import kda_prepare_hopper as prepare
from weft.ops.triton.launch import launches_handled

ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
C, K = 64, 128
TOLERANCE = 2**-9 + 4 * 2**-11  # outputs are rounded to bfloat16, units and what decays leave of them to float16


def expected(q: Tensor, k: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, ...]:
    """Compute a chunk and head of ``[L, 128]`` in float64: keys, system, attention, and the vectors' three parts."""
    length = len(g)
    q, k = ((x / (x.square().sum(1, keepdim=True) + L2_EPS).sqrt()) for x in (q.double(), k.double()))
    sums = g.double().cumsum(0)
    between = (sums[:, None] - sums[None, :]).exp()
    below = torch.ones(length, length, device=g.device).tril(-1).bool()
    system = torch.einsum("ic,jc,ijc->ij", k, k, between).where(below, 0.0) * beta.double()[:, None]
    attention = torch.einsum("ic,jc,ijc->ij", q, k, between).where(below, 0.0) * K**-0.5
    keys = torch.stack([k * sums.exp(), q * sums.exp() * K**-0.5, k * (sums[-1] - sums).exp()])
    return keys, system, attention, beta.double(), (q * k).sum(1) * K**-0.5, sums[-1].exp()


@pytest.mark.parametrize("strength", [0.02, 1.0, 60.0])
def test_chunks_equal_float64(strength: float) -> None:
    """Whole and short chunks, one without tokens; decays that hardly, clearly, and totally forget."""
    lengths, heads = [64, 64, 33, 0, 1, 16], 2
    total = sum(lengths)
    wide, q = (torch.randn(total + 3, n * heads * K, device=DEVICE).bfloat16() for n in (2, 1))
    q, k = q.view(total + 3, heads, K), wide[:, heads * K :].view(total + 3, heads, K)
    g = -strength * torch.rand(total + 3, heads, K, device=DEVICE)
    g[5:9] *= 0.0  # tokens that forget nothing
    beta = torch.rand(total + 3, heads, device=DEVICE)
    for x in (q, wide, g, beta):
        x[total:] = torch.nan  # padding
    starts = torch.tensor([0, *lengths]).cumsum(0)[:-1].int().to(DEVICE)
    table = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    chunks = ChunkTable(table, starts, table, table, table, max_seqs=1)
    shapes = (
        ((3, C, K), torch.bfloat16),
        ((C, C), torch.float16),
        ((C, C), torch.bfloat16),
        ((2 * C + K,), torch.float32),
    )
    outputs = tuple(torch.full((6, heads, *shape), torch.nan, dtype=dtype, device=DEVICE) for shape, dtype in shapes)
    if ON_HOPPER:
        prepare.launch_prepare(q, k, g, beta, chunks, outputs)
    else:
        emulator = Emulator()
        with launches_handled(emulator.handle):
            prepare.launch_prepare(q, k, g, beta, chunks, outputs)
        assert len(emulator.waited) == len(lengths) * heads
    keys, system, attention, vectors = outputs
    for chunk, (start, length) in enumerate(zip(starts.tolist(), lengths, strict=True)):
        for head in range(heads):
            mine = slice(start, start + length)
            if length == 0:
                assert all(x[chunk, head].isnan().all() for x in outputs), "nothing is written"
                continue
            want = expected(q[mine, head], k[mine, head], g[mine, head], beta[mine, head])
            found = (
                keys[chunk, head, :, :length], system[chunk, head, :length, :length],
                attention[chunk, head, :length, :length], vectors[chunk, head, :length],
                vectors[chunk, head, C : C + length], vectors[chunk, head, 2 * C :],
            )  # fmt: skip
            for place, (ours, theirs) in enumerate(zip(found, want, strict=True)):
                error = (ours.double() - theirs).norm() / theirs.norm().clamp(min=1e-30)
                assert error < TOLERANCE, (chunk, head, place, error)
            assert (keys[chunk, head, :, length:] == 0).all(), "tokens beyond the chunk"
            assert (system[chunk, head].triu() == 0).all() and (attention[chunk, head].triu() == 0).all()
            assert (system[chunk, head, length:] == 0).all() and (attention[chunk, head, length:] == 0).all()


@pytest.mark.skipif(DEVICE == "cuda", reason="other kernels are interpreted, so that they are no launches")
def test_what_the_kernel_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads of 128 in bfloat16 on Hopper; all else, and a shape that a measurement gives, goes to plain Triton."""

    def launched(is_hopper: bool, dtype: torch.dtype, dim: int, shape: kda.Shape | None = None) -> list[str]:
        monkeypatch.setattr(prepare, "runs_gluon", lambda device: is_hopper)
        names: list[str] = []
        q, g, lengths = torch.zeros(5, 2, dim).to(dtype), torch.zeros(5, 2, dim), torch.tensor([5], dtype=torch.int32)
        chunks = ChunkTable(lengths, lengths - 5, lengths, lengths, lengths, max_seqs=1)
        with launches_handled(lambda kernel, *launch: names.append(kernel.__name__)):
            kda.prepare_channels(q, q, g, g[..., 0], chunks, shape=shape)
        return names

    assert launched(True, torch.bfloat16, 128) == ["_prepare_hopper_kernel"]
    for other in ((False, torch.bfloat16, 128), (True, torch.float16, 128), (True, torch.bfloat16, 64)):
        assert launched(*other) == []
    assert launched(True, torch.bfloat16, 128, kda.Shape(128, 8, None)) == []
