"""Top-k router kernels: scores, selection and weights of one token's experts in one launch.

Job: ``topk_router`` and ``sigmoid_router`` on the GPU. Owns: the order among equal scores (the lower expert id first).
Does not know: experts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.ops.triton.early_launch import early_launch, release, wait
from weft.ops.triton.elementwise import sigmoid
from weft.ops.triton.launch import jit
from weft.ops.triton.sizes import next_power_of_2


@triton.jit
def _store_chosen(
    weights, ids, shared_gate, row, num_tokens, stride_gate, chosen, chosen_ids,
    FIRST: tl.constexpr, COUNT: tl.constexpr, TOP_K: tl.constexpr, SHARED: tl.constexpr, GATED: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Write a token's experts, and behind them the shared one."""
    places = tl.arange(0, BLOCK_K)
    local = chosen_ids - FIRST
    local = tl.where((local >= 0) & (local < COUNT), local, -1)
    PLACES: tl.constexpr = TOP_K + 1 if SHARED else TOP_K
    if SHARED:
        gate = 1.0
        if GATED:
            gate = sigmoid(tl.load(shared_gate + row * stride_gate).to(tl.float32))
        is_real = row < num_tokens
        chosen = tl.where(places == TOP_K, tl.where(is_real, gate, 0.0), chosen)
        local = tl.where(places == TOP_K, tl.where(is_real, COUNT, -1), local)
    tl.store(weights + row * PLACES + places, chosen, mask=places < PLACES)
    tl.store(ids + row * PLACES + places, local, mask=places < PLACES)


@triton.jit
def _sortable(x):
    """Integers in the order of 2 or 4 byte floats; the two zeros are equal."""
    if x.dtype.primitive_bitwidth == 16:
        bits = x.to(tl.int16, bitcast=True).to(tl.int32)
        ordered = tl.where(bits < 0, bits ^ 0x7FFF, bits)
    else:
        bits = x.to(tl.int32, bitcast=True)
        ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(x == 0.0, 0, ordered)


@triton.jit
def _best_experts(values, experts, inside, TOP_K: tl.constexpr, BLOCK_K: tl.constexpr):
    """``[BLOCK_K]``: the experts with the highest values, the lower id first among equals; -1 behind them.

    A maximum of 32-bit integers over a warp is one instruction on the GPU. With values of 16 bits one integer holds
    value and id: the next best one is the least far below the one before, as an unsigned distance, in which those that
    are taken already wrap around. Else the lowest id of the highest value takes a second maximum.
    """
    places = tl.arange(0, BLOCK_K)
    PACKED: tl.constexpr = values.dtype.primitive_bitwidth == 16
    keys = _sortable(values)
    if PACKED:
        keys = (keys << 16) | (0xFFFF - experts)
    keys = tl.where(inside, keys, -0x80000000)
    chosen = tl.full([BLOCK_K], -1, dtype=tl.int32)
    before = tl.full([], 0x7FFFFFFF, dtype=tl.int32)
    for place in tl.static_range(TOP_K):
        if PACKED:
            best = before - tl.min((before - keys).to(tl.uint32, bitcast=True), 0).to(tl.int32, bitcast=True)
            before = best - 1
            expert = 0xFFFF - (best & 0xFFFF)
        else:
            best = tl.max(keys, 0)
            expert = tl.min(tl.where(keys == best, experts, 0x7FFFFFFF), 0)
            keys = tl.where(experts == expert, -0x80000000, keys)
        chosen = tl.where(places == place, expert, chosen)
    return chosen


@jit(do_not_specialize=["num_tokens"])
def _router_kernel(
    logits, shared_gate, weights, ids, num_tokens_ptr, num_tokens, stride_logits, stride_gate,
    FIRST: tl.constexpr, COUNT: tl.constexpr, NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr,
    SHARED: tl.constexpr, GATED: tl.constexpr, RENORMALIZE: tl.constexpr, COUNT_ON_DEVICE: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A logit is higher where its probability is, and of the chosen ones alone the sum is their weights' if those are
    renormalised."""
    release(EARLY)
    row = tl.program_id(0).to(tl.int64)
    experts = tl.arange(0, BLOCK_E)
    places = tl.arange(0, BLOCK_K)
    if COUNT_ON_DEVICE:
        num_tokens = tl.load(num_tokens_ptr)
    wait(EARLY)
    chosen_ids = tl.full([BLOCK_K], -1, dtype=tl.int32)
    chosen = tl.zeros([BLOCK_K], dtype=tl.float32)
    if row < num_tokens:
        inside = experts < NUM_EXPERTS
        row_logits = logits + row * stride_logits
        x = tl.load(row_logits + experts, mask=inside, other=float("-inf"))
        chosen_ids = _best_experts(x, experts, inside, TOP_K, BLOCK_K)
        best = tl.load(row_logits + chosen_ids, mask=places < TOP_K, other=float("-inf")).to(tl.float32)
        highest = tl.max(best, 0)
        chosen = tl.exp(best - highest)
        if RENORMALIZE:
            chosen = chosen / tl.sum(chosen, 0)
        else:
            chosen = chosen / tl.sum(tl.exp(x.to(tl.float32) - highest), 0)
    _store_chosen(
        weights, ids, shared_gate, row, num_tokens, stride_gate, chosen, chosen_ids,
        FIRST, COUNT, TOP_K, SHARED, GATED, BLOCK_K,
    )  # fmt: skip


@triton.jit
def _best_groups(choice, experts, NUM_GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, GROUP_SIZE: tl.constexpr):
    """``choice`` with minus infinity where an expert's group is not one of the best."""
    taken = tl.full(choice.shape, 0, tl.int1)
    left = tl.full(choice.shape, 1, tl.int1)
    for _ in tl.static_range(TOP_GROUPS):
        best_score = float("-inf")
        best_group = 0
        for group in tl.static_range(NUM_GROUPS):
            scores = tl.where((experts // GROUP_SIZE == group) & left, choice, float("-inf"))
            first = tl.max(scores, 0)
            second = tl.max(tl.where(experts == tl.argmax(scores, 0), float("-inf"), scores), 0)
            score = first + second if GROUP_SIZE > 1 else first
            best_group = tl.where(score > best_score, group, best_group)
            best_score = tl.maximum(score, best_score)
        taken = taken | (experts // GROUP_SIZE == best_group)
        left = left & (experts // GROUP_SIZE != best_group)
    return tl.where(taken, choice, float("-inf"))


@jit(do_not_specialize=["num_tokens"])
def _sigmoid_router_kernel(
    logits, shared_gate, bias, weights, ids, num_tokens_ptr, num_tokens, stride_logits, stride_gate, epsilon, scale,
    FIRST: tl.constexpr, COUNT: tl.constexpr, NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr,
    NUM_GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, BIASED: tl.constexpr,
    SHARED: tl.constexpr, GATED: tl.constexpr, RENORMALIZE: tl.constexpr,
    COUNT_ON_DEVICE: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    release(EARLY)
    row = tl.program_id(0).to(tl.int64)
    experts = tl.arange(0, BLOCK_E)
    places = tl.arange(0, BLOCK_K)
    if COUNT_ON_DEVICE:
        num_tokens = tl.load(num_tokens_ptr)
    wait(EARLY)
    chosen_ids = tl.full([BLOCK_K], -1, dtype=tl.int32)
    chosen = tl.zeros([BLOCK_K], dtype=tl.float32)
    if row < num_tokens:
        inside = experts < NUM_EXPERTS
        row_logits = logits + row * stride_logits
        choice = sigmoid(tl.load(row_logits + experts, mask=inside, other=0.0).to(tl.float32))
        if BIASED:
            choice += tl.load(bias + experts, mask=inside, other=0.0)
        choice = tl.where(inside, choice, float("-inf"))
        if TOP_GROUPS < NUM_GROUPS:
            choice = _best_groups(choice, experts, NUM_GROUPS, TOP_GROUPS, NUM_EXPERTS // NUM_GROUPS)
        chosen_ids = _best_experts(choice, experts, inside, TOP_K, BLOCK_K)
        taken = tl.load(row_logits + chosen_ids, mask=places < TOP_K, other=0.0).to(tl.float32)
        chosen = tl.where(places < TOP_K, sigmoid(taken), 0.0)
        if RENORMALIZE:
            chosen = chosen / (tl.sum(chosen, 0) + epsilon)
        chosen *= scale
    _store_chosen(
        weights, ids, shared_gate, row, num_tokens, stride_gate, chosen, chosen_ids,
        FIRST, COUNT, TOP_K, SHARED, GATED, BLOCK_K,
    )  # fmt: skip


def sigmoid_router_triton(
    logits: Tensor,
    bias: Tensor | None,
    top_k: int,
    *,
    renormalize: bool,
    epsilon: float,
    scale: float,
    num_groups: int,
    top_groups: int,
    num_tokens: int | Tensor,
    first_expert: int = 0,
    num_experts: int | None = None,
    shared_expert: bool = False,
    shared_gate: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``sigmoid_router`` of ``weft/ops/moe.py``."""
    num_rows, all_experts = logits.shape
    assert logits.stride(1) == 1 and top_k <= all_experts // num_groups * top_groups
    places, gate = top_k + shared_expert, logits if shared_gate is None else shared_gate
    weights = torch.empty((num_rows, places), dtype=torch.float32, device=logits.device)
    ids = torch.empty((num_rows, places), dtype=torch.int32, device=logits.device)
    on_device = isinstance(num_tokens, Tensor)
    _sigmoid_router_kernel[(num_rows,)](
        logits, gate, weights if bias is None else bias, weights, ids, num_tokens if on_device else ids,
        0 if on_device else num_tokens, logits.stride(0), gate.stride(0), epsilon, scale,
        FIRST=first_expert, COUNT=all_experts - first_expert if num_experts is None else num_experts,
        NUM_EXPERTS=all_experts, TOP_K=top_k, NUM_GROUPS=num_groups, TOP_GROUPS=top_groups, BIASED=bias is not None,
        SHARED=shared_expert, GATED=shared_gate is not None, RENORMALIZE=renormalize, COUNT_ON_DEVICE=on_device,
        BLOCK_E=next_power_of_2(all_experts), BLOCK_K=next_power_of_2(places), num_warps=1,
        **early_launch(logits.device),
    )  # fmt: skip
    return weights, ids


def topk_router_triton(
    logits: Tensor,
    top_k: int,
    *,
    renormalize: bool,
    num_tokens: int | Tensor,
    first_expert: int = 0,
    num_experts: int | None = None,
    shared_expert: bool = False,
    shared_gate: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``topk_router`` of ``weft/ops/moe.py``."""
    num_rows, all_experts = logits.shape
    assert logits.stride(1) == 1 and top_k <= all_experts
    places, gate = top_k + shared_expert, logits if shared_gate is None else shared_gate
    weights = torch.empty((num_rows, places), dtype=torch.float32, device=logits.device)
    ids = torch.empty((num_rows, places), dtype=torch.int32, device=logits.device)
    on_device = isinstance(num_tokens, Tensor)
    _router_kernel[(num_rows,)](
        logits, gate, weights, ids, num_tokens if on_device else ids, 0 if on_device else num_tokens,
        logits.stride(0), gate.stride(0),
        FIRST=first_expert, COUNT=all_experts - first_expert if num_experts is None else num_experts,
        NUM_EXPERTS=all_experts, TOP_K=top_k, SHARED=shared_expert, GATED=shared_gate is not None,
        RENORMALIZE=renormalize, COUNT_ON_DEVICE=on_device,
        BLOCK_E=next_power_of_2(all_experts), BLOCK_K=next_power_of_2(places), num_warps=1,
        **early_launch(logits.device),
    )  # fmt: skip
    return weights, ids
