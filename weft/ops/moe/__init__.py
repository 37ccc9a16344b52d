"""Mixture of experts: choosing experts, and running each token through its own.

Job: softmax and sigmoid routing, and the expert MLPs (SwiGLU), with weights in the inputs' dtype or in FP8 (e4m3) as
``weft.ops.fp8`` defines it. Owns: the meaning of id -1 (no expert: padding). Does not know: the router's projection,
shared experts, or how experts are sharded.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.ops.activation import silu_and_mul
from weft.ops.backend import Backend, with_kernel
from weft.ops.fp8 import Fp8Matrix
from weft.ops.linear import fp8_linear
from weft.ops.rows import by_row
from weft.ops.traced import traced_op


class RoutingRule(NamedTuple):
    """How experts are scored: by a float32 softmax over all experts, or by sigmoids (DeepSeek-V3, arXiv 2412.19437).

    Attributes:
        sigmoid: choose the experts with the highest ``sigmoid(logit) + bias``, weighted by the sigmoid alone. All other
            fields but the bias are for sigmoids only.
        bias: ``[E]`` float32, or None. It is added to probabilities of a softmax in the same way (ZAYA1).
        epsilon: added to the sum by which ``renormalize`` divides.
        scale: factor of the routed experts' weights, after that division.
        num_groups, top_groups: experts stand in ``num_groups`` equal groups. Only experts of the ``top_groups`` groups
            whose two best experts have the highest sum can be chosen.
        num_always: so many experts at the end are chosen for every token, after the others. ``bias`` has no entries for
            them. Their scores take part in the sum by which ``renormalize`` divides.
    """

    sigmoid: bool = False
    bias: Tensor | None = None
    epsilon: float = 0.0
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    num_always: int = 0


SOFTMAX = RoutingRule()


def _router_rows(reference: Callable[..., tuple[Tensor, Tensor]], *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """The router row by row, then padding."""
    num_tokens = kwargs.pop("num_tokens")
    weights, ids = by_row("logits", "shared_gate")(reference, *args, num_tokens=1, **kwargs)
    return _without_padding(weights, ids, num_tokens)


@traced_op()
@with_kernel("weft.ops.moe.router", _router_rows)
def topk_router(
    logits: Tensor,
    top_k: int,
    *,
    renormalize: bool,
    num_tokens: int | Tensor,
    first_expert: int = 0,
    num_experts: int | None = None,
    shared_expert: bool = False,
    shared_gate: Tensor | None = None,
    rule: RoutingRule = SOFTMAX,
    backend: Backend,
) -> tuple[Tensor, Tensor]:
    """Choose the ``top_k`` experts of each token.

    Args:
        logits: ``[T, E]``.
        top_k: experts per token, without those that every token has.
        renormalize: make the chosen weights sum to one (``norm_topk_prob``).
        num_tokens: real tokens; the rows from there on are padding. A ``[1]`` int32 tensor is read on the device.
        first_expert, num_experts: the experts that are here (``num_experts`` None: all from ``first_expert`` on). Ids
            count from the first of them; experts that are elsewhere, and classes without an expert, get id -1.
        shared_expert: add one more place per token for a shared expert, which sees all tokens. Its id is the number of
            experts that are here.
        shared_gate: ``[T, 1]``, or None. The weight of the shared expert is ``sigmoid(shared_gate)``, or 1.

    Returns:
        ``(weights [T, k] float32, ids [T, k] int32)``, k being ``top_k`` and more as said above; padding rows have
        weight 0 and id -1.
    """
    if rule.sigmoid:
        scores = logits.float().sigmoid()
        chosen = scores[:, : scores.shape[1] - rule.num_always]
        choice = chosen if rule.bias is None else chosen + rule.bias
        ids = _of_best_groups(choice, rule.num_groups, rule.top_groups).topk(top_k, dim=-1)[1]
        always = torch.arange(chosen.shape[1], scores.shape[1], device=ids.device).expand(ids.shape[0], -1)
        ids = torch.cat([ids, always], dim=1)
        weights = scores.gather(1, ids)
    else:
        scores = torch.softmax(logits, dim=-1, dtype=torch.float32)
        ids = (scores if rule.bias is None else scores + rule.bias).topk(top_k, dim=-1)[1]
        weights = scores.gather(1, ids)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + rule.epsilon)
    if rule.sigmoid:
        weights = weights * rule.scale
    ids = _local_ids(ids, first_expert, num_experts)
    if shared_expert:
        weights, ids = _with_shared(weights, ids, num_experts or logits.shape[1] - first_expert, shared_gate)
    return _without_padding(weights, ids, num_tokens)


def _of_best_groups(choice: Tensor, num_groups: int, top_groups: int) -> Tensor:
    """``choice [T, E]`` with minus infinity where an expert's group is not one of the best."""
    if top_groups == num_groups:
        return choice
    groups = choice.unflatten(1, (num_groups, -1))
    best = groups.topk(min(2, groups.shape[2]), dim=2)[0].sum(2).topk(top_groups, dim=1)[1]
    taken = torch.zeros_like(groups[:, :, 0], dtype=torch.bool).scatter_(1, best, True)
    return groups.masked_fill(~taken[:, :, None], -torch.inf).flatten(1)


def _local_ids(ids: Tensor, first_expert: int, num_experts: int | None) -> Tensor:
    """Ids from the first expert that is here; none (-1) for experts that are elsewhere."""
    ids = ids.int() - first_expert
    return ids if num_experts is None else ids.masked_fill_((ids < 0) | (ids >= num_experts), -1)


def _with_shared(weights: Tensor, ids: Tensor, number: int, gate: Tensor | None) -> tuple[Tensor, Tensor]:
    """Add one more place for the shared expert, which has id ``number``."""
    weight = torch.ones_like(weights[:, :1]) if gate is None else gate.float().sigmoid()
    return torch.cat([weights, weight], dim=1), torch.cat([ids, torch.full_like(ids[:, :1], number)], dim=1)


def _without_padding(weights: Tensor, ids: Tensor, num_tokens: int | Tensor) -> tuple[Tensor, Tensor]:
    """Assign no expert (-1) to rows from ``num_tokens`` on."""
    if isinstance(num_tokens, Tensor):
        padding = (torch.arange(ids.shape[0], device=ids.device) >= num_tokens)[:, None]
        return weights.masked_fill_(padding, 0.0), ids.masked_fill_(padding, -1)
    if num_tokens < ids.shape[0]:
        weights[num_tokens:] = 0.0
        ids[num_tokens:] = -1
    return weights, ids


def _experts(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weights: Tensor,
    ids: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    *activation: Any,
) -> Tensor:
    gated = gate_up.shape[1] == 2 * down.shape[2]

    def run(expert: int, rows: Tensor) -> Tensor:
        hidden = F.linear(rows, gate_up[expert], None if gate_up_bias is None else gate_up_bias[expert])
        hidden = expert_activation(hidden, gated, *activation)
        return F.linear(hidden, down[expert], None if down_bias is None else down_bias[expert])

    return sum_over_experts(x, weights, ids, gate_up.shape[0], run)


def expert_activation(
    hidden: Tensor,
    gated: bool,
    alpha: float,
    limit: float | None,
    up_offset: float,
    gate_cap: float | None,
    up_cap: float | None,
) -> Tensor:
    """The activation of experts, as ``fused_moe`` and ``ExpertExtras`` say."""
    if gate_cap is not None and up_cap is not None:
        return softcapped_swiglu(hidden, gate_cap, up_cap)
    if limit is not None:
        return clamped_swiglu(hidden, alpha, limit, up_offset)
    return silu_and_mul.reference(hidden) if gated else hidden.relu().square()


def clamped_swiglu(x: Tensor, alpha: float, limit: float, up_offset: float) -> Tensor:
    """``gate * sigmoid(alpha * gate) * (up + up_offset)`` of ``[..., gate | up]``, clamped as in ``ClampedSwiGLU``."""
    gate, up = x.chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + up_offset)


def softcapped_swiglu(x: Tensor, gate_cap: float, up_cap: float) -> Tensor:
    """``cap(gate) * sigmoid(gate) * cap(up)`` of ``[..., gate | up]``, where ``cap(y) = c * tanh(y / c)`` (Inkling 2).
    Computed in float32."""
    gate, up = x.float().chunk(2, dim=-1)
    capped = (c * torch.tanh(y / c) for y, c in ((gate, gate_cap), (up, up_cap)))
    return (next(capped) * torch.sigmoid(gate) * next(capped)).to(x.dtype)


def sum_over_experts(
    x: Tensor, weights: Tensor, ids: Tensor, num_experts: int, run: Callable[[int, Tensor], Tensor]
) -> Tensor:
    """``sum_j weights[t, j] * run(ids[t, j], x_t)``; the host reads the ids. ``run`` takes an expert and its rows."""
    if x.shape[0] == 1:
        return _one_token(x, weights, ids, run)
    return _many_tokens(x, weights, ids, num_experts, run)


def _one_token(x: Tensor, weights: Tensor, ids: Tensor, run: Callable[[int, Tensor], Tensor]) -> Tensor:
    """Nothing to sort: one expert after the other."""
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert, weight in zip(ids[0].tolist(), weights[0], strict=True):
        if expert >= 0:
            out.addcmul_(run(expert, x), weight)
    return out.to(x.dtype)


def _many_tokens(
    x: Tensor, weights: Tensor, ids: Tensor, num_experts: int, run: Callable[[int, Tensor], Tensor]
) -> Tensor:
    """Sort the (token, expert) pairs by expert and run each hit expert once over its tokens."""
    top_k = ids.shape[1]
    flat = ids.flatten().long()
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat + 1, minlength=num_experts + 1).tolist()
    order = order[counts[0] :]  # id -1 sorts first: padding meets no expert
    tokens = order // top_k
    batches = enumerate(x.index_select(0, tokens).split(counts[1:]))
    results = [run(expert, rows) for expert, rows in batches if rows.shape[0]]
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    if results:
        weighted = torch.cat(results) * weights.flatten()[order, None]
        out.index_add_(0, tokens, weighted)
    return out.to(x.dtype)


def add_shared(out: Tensor, shared: Tensor | None, shared_gate: Tensor | None) -> Tensor:
    """``out + sigmoid(shared_gate) * shared``, of which the gate, or both, may be missing."""
    if shared is None:
        return out
    return out + shared if shared_gate is None else torch.addcmul(out, torch.sigmoid(shared_gate), shared)


_LIBRARY = torch.library.Library("weft", "FRAGMENT")
_LIBRARY.define(
    "experts_reference(Tensor x, Tensor gate_up, Tensor down, Tensor weights, Tensor ids, Tensor? gate_up_bias, "
    "Tensor? down_bias, float alpha, float? limit, float up_offset, float? gate_cap, float? up_cap) -> Tensor"
)
_LIBRARY.impl("experts_reference", _experts, "CompositeExplicitAutograd")


class ExpertExtras(NamedTuple):
    """Optional biases and the activation of experts.

    Attributes:
        gate_up_bias, down_bias: ``[E, 2 * I]`` and ``[E, H]`` to add to the projections, or None.
        alpha, limit, up_offset: with a limit the activation is ``clamped_swiglu`` of them.
        gate_cap, up_cap: with both, the activation is ``softcapped_swiglu`` of them.
    """

    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    alpha: float = 1.0
    limit: float | None = None
    up_offset: float = 1.0
    gate_cap: float | None = None
    up_cap: float | None = None

    @property
    def activation(self) -> tuple[float | None, ...]:
        """The numbers for kernels. Numbers of other activations are None."""
        clamp = (None, None, None) if self.limit is None else (self.alpha, self.limit, self.up_offset)
        return (*clamp, self.gate_cap, self.up_cap)


NO_EXTRAS = ExpertExtras()


class Routed(NamedTuple):
    """The experts of each token, and a shared expert of all tokens, as in ``fused_moe``."""

    weights: Tensor
    ids: Tensor
    shared: Tensor | None = None
    shared_gate: Tensor | None = None


@traced_op(fake=lambda x, *_, **__: torch.empty_like(x))
@with_kernel("weft.ops.moe.experts", by_row("x", "weights", "ids", "shared", "shared_gate"))
def fused_moe(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weights: Tensor,
    ids: Tensor,
    *,
    extras: ExpertExtras = NO_EXTRAS,
    shared: Tensor | None = None,
    shared_gate: Tensor | None = None,
    backend: Backend,
) -> Tensor:
    """``sum_j weights[t, j] * down[e] (silu(gate[e] x_t) * (up[e] x_t))`` with ``e = ids[t, j]``.

    Args:
        x: ``[T, H]``.
        gate_up: ``[E, 2 * I, H]``, gate rows, then up rows. With ``[E, I, H]`` experts have no gate, and the activation
            is the square of ReLU.
        down: ``[E, H, I]``.
        weights: ``[T, k]``.
        ids: ``[T, k]`` integers (int32 for the kernel); -1 means no expert.
        shared: ``[T, H]``, output of a shared expert to add, times ``sigmoid(shared_gate)``.
        shared_gate: ``[T, 1]``, or None: the shared expert is added as it is.

    Returns:
        ``[T, H]`` in x's dtype; rows without experts are zero (but for the shared expert).
    """
    # The host reads the ids of the experts, so all experts are one operation to the dispatcher. A recorder of
    # operations (the graph emulator) sees a unit and never a frozen list of experts.
    out = torch.ops.weft.experts_reference(x, gate_up, down, weights, ids, *extras)
    return add_shared(out, shared, shared_gate)


@traced_op(fake=lambda x, *_, **__: torch.empty_like(x))
@with_kernel("weft.ops.moe.fp8_experts", by_row("x", "weights", "ids", "shared", "shared_gate"))
def fp8_fused_moe(
    x: Tensor,
    gate_up: Fp8Matrix,
    down: Fp8Matrix,
    weights: Tensor,
    ids: Tensor,
    *,
    extras: ExpertExtras = NO_EXTRAS,
    shared: Tensor | None = None,
    shared_gate: Tensor | None = None,
    backend: Backend,
) -> Tensor:
    """``sum_j weights[t, j] * down[e] (silu(gate[e] x_t) * (up[e] x_t))`` with ``e = ids[t, j]``.

    Args:
        x: ``[T, H]``.
        extras: the activation. There are no biases.
        gate_up, down: ``[E, 2 * I, H]`` (gate rows, then up rows) and ``[E, H, I]``, of the same ``block``: 128, or 0
            for scales by row and token.
        weights, ids, shared, shared_gate: as in ``fused_moe``.

    Returns:
        ``[T, H]`` in x's dtype, as ``fused_moe``.
    """
    # The experts are one operation to the dispatcher, as in ``fused_moe``.
    out = torch.ops.weft.fp8_experts_reference(x, gate_up[:3], down[:3], down.block, weights, ids, *extras[2:])
    return add_shared(out, shared, shared_gate)


def _fp8_experts(
    x: Tensor,
    gate_up: list[Tensor],
    down: list[Tensor],
    block: int,
    weights: Tensor,
    ids: Tensor,
    *activation: Any,
) -> Tensor:
    """``gate_up``, ``down``: the matrices, their scales, and one scale of all inputs or None."""

    def product(rows: Tensor, expert: int, matrices: Tensor, scales: Tensor, input_scale: Tensor | None) -> Tensor:
        return fp8_linear.reference(rows, matrices[expert], scales[expert], input_scale=input_scale, block=block)

    def run(expert: int, rows: Tensor) -> Tensor:
        hidden = expert_activation(product(rows, expert, *gate_up), True, *activation)
        return product(hidden, expert, *down)

    return sum_over_experts(x, weights, ids, gate_up[0].shape[0], run)


_LIBRARY.define(
    "fp8_experts_reference(Tensor x, Tensor?[] gate_up, Tensor?[] down, int block, Tensor weights, Tensor ids, "
    "float alpha, float? limit, float up_offset, float? gate_cap, float? up_cap) -> Tensor"
)
_LIBRARY.impl("fp8_experts_reference", _fp8_experts, "CompositeExplicitAutograd")
