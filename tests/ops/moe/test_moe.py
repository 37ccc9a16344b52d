"""Routing and expert MLPs against a loop over tokens and against transformers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextTopKRouter

from weft.ops.backend import Backend
from weft.ops.moe import RoutingRule, fused_moe, topk_router

TORCH = Backend.TORCH


def loop_moe(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """One token and expert at a time, in float64."""
    out = torch.zeros(x.shape, dtype=torch.double)
    for t in range(x.shape[0]):
        for weight, e in zip(weights[t].double(), ids[t].tolist(), strict=True):
            if e >= 0:
                gate, up = (gate_up[e].double() @ x[t].double()).chunk(2)
                out[t] += weight * (down[e].double() @ (F.silu(gate) * up))
    return out


def test_sigmoid_weights_by_hand() -> None:
    """The sum that weights are divided by, their factor, and experts that are elsewhere."""
    logits = torch.tensor([[0.0, 1.0, 2.0, -3.0]])
    rule = RoutingRule(sigmoid=True, epsilon=0.5, scale=3.0)
    here = {"first_expert": 2, "num_experts": 1, "num_tokens": 1}
    weights, ids = topk_router(logits, 3, renormalize=True, **here, rule=rule, backend=TORCH)
    scores = torch.sigmoid(torch.tensor([2.0, 1.0, 0.0]))
    torch.testing.assert_close(weights[0], 3.0 * scores / (scores.sum() + 0.5))
    assert ids.tolist() == [[0, -1, -1]]


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 63, 130])
@pytest.mark.parametrize(("num_experts", "top_k"), [(16, 4), (5, 5), (130, 7), (3, 1)])
def test_experts_equal_a_loop(num_tokens: int, num_experts: int, top_k: int) -> None:
    padding = 2
    x = torch.randn(num_tokens + padding, 12)
    x[num_tokens:] = torch.nan
    gate_up, down = torch.randn(num_experts, 10, 12), torch.randn(num_experts, 12, 5)
    logits = torch.randn(num_tokens + padding, num_experts)
    logits[num_tokens:] = torch.nan
    weights, ids = topk_router(logits, top_k, renormalize=True, num_tokens=num_tokens, backend=TORCH)
    assert ids.dtype == torch.int32
    assert (ids[num_tokens:] == -1).all()
    assert (weights[num_tokens:] == 0).all()
    out = fused_moe(x, gate_up, down, weights, ids, backend=TORCH)
    assert (out[num_tokens:] == 0).all()
    expected = loop_moe(x, gate_up, down, weights, ids)
    torch.testing.assert_close(out[:num_tokens].double(), expected[:num_tokens], atol=2e-5, rtol=1e-5)


def test_a_token_does_not_depend_on_its_neighbours() -> None:
    x = torch.randn(40, 12)
    gate_up, down = torch.randn(16, 10, 12), torch.randn(16, 12, 5)
    weights, ids = topk_router(torch.randn(40, 16), 4, renormalize=False, num_tokens=40, backend=TORCH)
    together = fused_moe(x, gate_up, down, weights, ids, backend=TORCH)
    alone = [
        fused_moe(x[i : i + 1], gate_up, down, weights[i : i + 1], ids[i : i + 1], backend=TORCH) for i in range(40)
    ]
    torch.testing.assert_close(together, torch.cat(alone), atol=2e-5, rtol=1e-5)


def test_only_padding_gives_zeros() -> None:
    ids = torch.full((30, 2), -1, dtype=torch.int32)
    out = fused_moe(
        torch.full((30, 4), torch.nan),
        torch.randn(3, 6, 4),
        torch.randn(3, 4, 3),
        torch.zeros(30, 2),
        ids,
        backend=TORCH,
    )
    assert (out == 0).all()


@pytest.mark.parametrize("renormalize", [False, True])
def test_router_equals_transformers(renormalize: bool) -> None:
    config = Qwen3NextConfig(num_experts=11, num_experts_per_tok=3, hidden_size=8, norm_topk_prob=renormalize)
    router = Qwen3NextTopKRouter(config)
    torch.nn.init.normal_(router.weight)
    x = torch.randn(65, 8)
    logits, scores, indices = router(x)
    weights, ids = topk_router(logits, 3, renormalize=renormalize, num_tokens=65, backend=TORCH)
    assert torch.equal(ids.long(), indices)
    torch.testing.assert_close(weights, scores)
