"""Norms, rotary embedding and SwiGLU, against transformers and float64 formulas."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNorm, Qwen3NextRMSNormGated

from weft.config.rope import RopeConfig
from weft.errors import UnsupportedModelError
from weft.ops.activation import silu_and_mul
from weft.ops.backend import Backend
from weft.ops.norm import gated_rms_norm, rms_norm
from weft.ops.rotary import apply_rotary, inverse_frequencies, rotary_table

TORCH = Backend.TORCH


@pytest.mark.parametrize("shape", [(1, 7), (65, 64), (3, 5, 33)])
@pytest.mark.parametrize("zero_centered", [False, True])
def test_rms_norm_equals_transformers(shape: tuple[int, ...], zero_centered: bool) -> None:
    x, weight = torch.randn(shape) * 3, torch.randn(shape[-1])
    module = (Qwen3NextRMSNorm if zero_centered else Qwen3RMSNorm)(shape[-1], eps=1e-5)
    module.weight.data.copy_(weight)
    y = rms_norm(x, weight, 1e-5, zero_centered=zero_centered, backend=TORCH)
    torch.testing.assert_close(y, module(x))


def test_rms_norm_adds_the_residual_and_leaves_its_inputs() -> None:
    x, residual, weight = torch.randn(3, 4, 8).unbind(0)
    before = x.clone(), residual.clone()
    y, total = rms_norm(x, weight[0], 1e-6, residual=residual, backend=TORCH)
    assert torch.equal(total, x + residual)
    torch.testing.assert_close(y, rms_norm(total, weight[0], 1e-6, backend=TORCH))
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])


def test_rms_norm_adds_parts_of_a_sum_first() -> None:
    parts, residual, weight = torch.randn(3, 4, 8), torch.randn(4, 8).bfloat16(), torch.randn(8).bfloat16()
    got = rms_norm(parts, weight, 1e-6, residual=residual, backend=TORCH)
    want = rms_norm(parts.sum(0).bfloat16(), weight, 1e-6, residual=residual, backend=TORCH)
    for part, whole in zip(got, want, strict=True):
        assert part.dtype == torch.bfloat16 and torch.equal(part, whole)


@pytest.mark.parametrize("zero_centered", [False, True])
def test_low_precision_norms_round_once(zero_centered: bool) -> None:
    x, weight = torch.randn(65, 64).bfloat16(), torch.randn(64).bfloat16()
    y = rms_norm(x, weight, 1e-6, zero_centered=zero_centered, backend=TORCH)
    exact = rms_norm(x.double().float(), weight.float(), 1e-6, zero_centered=zero_centered, backend=TORCH)
    assert torch.equal(y, exact.bfloat16())
    gate = torch.randn(65, 64).bfloat16()
    gated = gated_rms_norm(x, gate, weight, 1e-6, backend=TORCH)
    exact = gated_rms_norm(x.float(), gate.float(), weight.float(), 1e-6, backend=TORCH)
    assert torch.equal(gated, exact.bfloat16())


def test_gated_rms_norm_equals_transformers() -> None:
    x, gate, weight = torch.randn(65, 12), torch.randn(65, 12), torch.randn(12)
    module = Qwen3NextRMSNormGated(12, eps=1e-6)
    module.weight.data.copy_(weight)
    torch.testing.assert_close(gated_rms_norm(x, gate, weight, 1e-6, backend=TORCH), module(x, gate))


def test_silu_and_mul() -> None:
    x = torch.randn(3, 5, 14)
    gate, up = x[..., :7], x[..., 7:]
    torch.testing.assert_close(silu_and_mul(x, backend=TORCH), gate * gate.sigmoid() * up)


SCALINGS = {
    "linear": {"factor": 3.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 256},
    "yarn attention": {"factor": 4.0, "original_max_position_embeddings": 256, "attention_factor": 1.7},
    "yarn mscale": {
        "factor": 40.0,
        "original_max_position_embeddings": 128,
        "mscale": 1.2,
        "mscale_all_dim": 0.8,
        "beta_fast": 16,
        "beta_slow": 2,
        "truncate": False,
    },
    "yarn mscale alone": {"factor": 4.0, "original_max_position_embeddings": 256, "mscale": 0.7},
    "yarn mscale and none": {
        "factor": 4.0,
        "original_max_position_embeddings": 256,
        "mscale": 0.7,
        "mscale_all_dim": 0.0,
    },
    "yarn shorter": {"factor": 0.5, "original_max_position_embeddings": 256},
    "yarn wide": {"factor": 2.0, "original_max_position_embeddings": 64, "beta_fast": 1, "beta_slow": 1e-9},
    "yarn flat": {"factor": 2.0, "original_max_position_embeddings": 6, "beta_fast": 1, "beta_slow": 1},
    "yarn narrow": {"factor": 2.0, "original_max_position_embeddings": 8, "beta_fast": 1, "beta_slow": 1},
}


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("partial", [1.0, 0.25])
def test_frequencies_equal_transformers(name: str, partial: float) -> None:
    kind = name.split()[0]
    parameters = {"rope_type": kind, "rope_theta": 10_000.0, "partial_rotary_factor": partial, **SCALINGS[name]}
    config = LlamaConfig(head_dim=64, max_position_embeddings=1024, rope_parameters=parameters)
    theirs, their_factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    rope = RopeConfig(10_000.0, int(64 * partial), kind, dict(SCALINGS[name]))
    ours, factor = inverse_frequencies(rope, 1024)
    torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=0)
    assert factor == pytest.approx(their_factor)


def test_unknown_scaling_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"'dynamic'.*default, linear, llama3, proportional, yarn"):
        inverse_frequencies(RopeConfig(1e4, 8, "dynamic"), 64)


@pytest.mark.parametrize("kind", ["default", "yarn"])
def test_rotation_equals_transformers(kind: str) -> None:
    parameters = SCALINGS["yarn"] if kind == "yarn" else {}
    config = LlamaConfig(
        head_dim=16, max_position_embeddings=1024, rope_parameters={"rope_type": kind, "rope_theta": 1e4, **parameters}
    )
    q, k = torch.randn(5, 4, 16), torch.randn(5, 2, 16)
    positions = torch.tensor([0, 1, 63, 64, 210])
    cos, sin = LlamaRotaryEmbedding(config)(q, positions[None])
    their_q, their_k = apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin)
    table = rotary_table(RopeConfig(1e4, 16, kind, dict(parameters)), 1024, 256, "cpu")
    assert table.shape == (256, 16)
    our_q, our_k = apply_rotary(q, k, positions, table)
    torch.testing.assert_close(our_q, their_q[0].transpose(0, 1))
    torch.testing.assert_close(our_k, their_k[0].transpose(0, 1))


def test_partial_rotation_passes_the_rest_through() -> None:
    q, k, positions = torch.randn(3, 4, 16), torch.randn(3, 1, 16), torch.tensor([7, 0, 3])
    table = rotary_table(RopeConfig(1e4, 6), 64, 64, "cpu")
    our_q, our_k = apply_rotary(q, k, positions, table)
    small_q, small_k = apply_rotary(q[..., :6], k[..., :6], positions, table)
    assert torch.equal(our_q[..., :6], small_q)
    assert torch.equal(our_k[..., :6], small_k)
    assert torch.equal(our_q[..., 6:], q[..., 6:])
    assert torch.equal(our_k[..., 6:], k[..., 6:])
    assert torch.equal(our_q[1], q[1]), "position 0 turns nothing"
    low_q, _ = apply_rotary(q.bfloat16(), k.bfloat16(), positions, table)
    exact, _ = apply_rotary(q.bfloat16().float(), k.bfloat16().float(), positions, table)
    assert torch.equal(low_q, exact.bfloat16())
