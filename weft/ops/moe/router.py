"""Top-k router kernel: scores, selection and weights of one token's experts in one launch.

Job: ``topk_router`` on the GPU. Owns: the order among equal scores (the lower expert id first). Does not know: experts.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.ops.backend import launches
from weft.ops.moe import topk_router
from weft.ops.triton.early_launch import early_launch, release, wait
from weft.ops.triton.elementwise import sigmoid
from weft.ops.triton.launch import jit
from weft.ops.triton.sizes import cdiv, next_power_of_2


class Fixed(NamedTuple):
    """Compile-time parameters of the kernel.

    Attributes:
        first_expert, local_experts: the experts that are here; ``shared``: a shared one stands behind them.
        num_experts, top_k, num_groups, top_groups, renormalize, sigmoid: as of ``topk_router``.
        block_e, block_k: powers of two that hold all experts, and those of a token.
        block_g: a power of two that holds all groups; each has ``block_e // block_g`` places, a power of two.
        always: experts at the end that every token has; ``top_k`` counts them too.
    """

    first_expert: int
    local_experts: int
    shared: bool
    num_experts: int
    top_k: int
    num_groups: int
    top_groups: int
    renormalize: bool
    sigmoid: bool
    block_e: int
    block_k: int
    block_g: int
    always: int


@triton.jit
def _store_chosen(
    weights, ids, shared_gate, row, num_tokens, stride_gate, chosen, chosen_ids, FIXED: tl.constexpr
):  # fmt: skip
    """Write a token's experts, and behind them the shared one."""
    TOP_K: tl.constexpr = FIXED.top_k
    COUNT: tl.constexpr = FIXED.local_experts
    places = tl.arange(0, FIXED.block_k)
    local = chosen_ids - FIXED.first_expert
    local = tl.where((local >= 0) & (local < COUNT), local, -1)
    PLACES: tl.constexpr = TOP_K + 1 if FIXED.shared else TOP_K
    if FIXED.shared:
        gate = 1.0
        if shared_gate is not None:
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
    value and id. The next best integer has the smallest unsigned distance below the previous one; integers that were
    taken already wrap around. Wider values need a second maximum for the lowest id of the highest value.
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


@triton.jit
def _best_groups(choice, NUM_GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, BLOCK_G: tl.constexpr):
    """``choice``, ordered by group, with minus infinity where an expert's group is not one of the best. A group counts
    by the sum of its two best experts; among equals the lower one comes first."""
    SIZE: tl.constexpr = choice.shape[0] // BLOCK_G
    by_group = tl.reshape(choice, [BLOCK_G, SIZE])
    scores = tl.max(by_group, 1)
    if SIZE > 1:
        is_best = tl.arange(0, SIZE)[None, :] == tl.argmax(by_group, 1)[:, None]
        scores += tl.max(tl.where(is_best, float("-inf"), by_group), 1)
    groups = tl.arange(0, BLOCK_G)
    keys = tl.where(groups < NUM_GROUPS, _sortable(scores), -0x80000000)
    for _ in tl.static_range(TOP_GROUPS):
        best = tl.max(keys, 0)
        group = tl.min(tl.where(keys == best, groups, BLOCK_G), 0)
        keys = tl.where(groups == group, -0x80000000, keys)
    left = ((keys > -0x80000000) & (groups < NUM_GROUPS))[:, None]
    return tl.reshape(tl.where(left, float("-inf"), by_group), [BLOCK_G * SIZE])


@triton.jit
def _choose_by_softmax(row_logits, experts, inside, places, bias, FIXED: tl.constexpr):
    """Choose by logits, whose order is that of the probabilities, unless there is a bias. If weights are renormalised,
    the sum over the chosen experts is enough."""
    TOP_K: tl.constexpr = FIXED.top_k
    x = tl.load(row_logits + experts, mask=inside, other=float("-inf"))
    if bias is None:
        chosen_ids = _best_experts(x, experts, inside, TOP_K, FIXED.block_k)
    else:
        wide = x.to(tl.float32)
        odds = tl.exp(wide - tl.max(wide, 0))
        choice = odds / tl.sum(odds, 0) + tl.load(bias + experts, mask=inside, other=0.0)
        chosen_ids = _best_experts(choice, experts, inside, TOP_K, FIXED.block_k)
    best = tl.load(row_logits + chosen_ids, mask=places < TOP_K, other=float("-inf")).to(tl.float32)
    highest = tl.max(best, 0)
    chosen = tl.exp(best - highest)
    if FIXED.renormalize:
        chosen = chosen / tl.sum(chosen, 0)
    else:
        chosen = chosen / tl.sum(tl.exp(x.to(tl.float32) - highest), 0)
    return chosen_ids, chosen


@triton.jit
def _choose_by_sigmoid(row_logits, experts, inside, places, bias, epsilon, scale, FIXED: tl.constexpr):
    TOP_K: tl.constexpr = FIXED.top_k
    CHOSEN: tl.constexpr = FIXED.top_k - FIXED.always
    COUNT: tl.constexpr = FIXED.num_experts - FIXED.always
    NUM_GROUPS: tl.constexpr = FIXED.num_groups
    TOP_GROUPS: tl.constexpr = FIXED.top_groups
    if FIXED.always > 0:
        inside = inside & (experts < COUNT)
    choice = sigmoid(tl.load(row_logits + experts, mask=inside, other=0.0).to(tl.float32))
    if bias is not None:
        choice += tl.load(bias + experts, mask=inside, other=0.0)
    choice = tl.where(inside, choice, float("-inf"))
    if TOP_GROUPS < NUM_GROUPS:
        choice = _best_groups(choice, NUM_GROUPS, TOP_GROUPS, FIXED.block_g)
    chosen_ids = _best_experts(choice, experts, inside, CHOSEN, FIXED.block_k)
    if FIXED.always > 0:
        chosen_ids = tl.where(places < CHOSEN, chosen_ids, COUNT + places - CHOSEN)
    taken = tl.load(row_logits + chosen_ids, mask=places < TOP_K, other=0.0).to(tl.float32)
    chosen = tl.where(places < TOP_K, sigmoid(taken), 0.0)
    if FIXED.renormalize:
        chosen = chosen / (tl.sum(chosen, 0) + epsilon)
    return chosen_ids, chosen * scale


@jit(do_not_specialize=["num_tokens"])
def _router_kernel(
    logits, shared_gate, bias, weights, ids, token_count, num_tokens, stride_logits, stride_gate, epsilon, scale,
    FIXED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Compute one token."""
    release(EARLY)
    BLOCK_K: tl.constexpr = FIXED.block_k
    row = tl.program_id(0).to(tl.int64)
    experts, places = tl.arange(0, FIXED.block_e), tl.arange(0, BLOCK_K)
    if token_count is not None:
        num_tokens = tl.load(token_count)
    wait(EARLY)
    chosen_ids = tl.full([BLOCK_K], -1, dtype=tl.int32)
    chosen = tl.zeros([BLOCK_K], dtype=tl.float32)
    if row < num_tokens:
        inside = experts < FIXED.num_experts
        GROUP_SIZE: tl.constexpr = FIXED.num_experts // FIXED.num_groups
        GROUP_PLACES: tl.constexpr = FIXED.block_e // FIXED.block_g
        if GROUP_PLACES > GROUP_SIZE and FIXED.top_groups < FIXED.num_groups:
            places_inside = experts % GROUP_PLACES < GROUP_SIZE
            experts = experts // GROUP_PLACES * GROUP_SIZE + experts % GROUP_PLACES
            inside = places_inside & (experts < FIXED.num_experts)
        row_logits = logits + row * stride_logits
        if FIXED.sigmoid:
            chosen_ids, chosen = _choose_by_sigmoid(row_logits, experts, inside, places, bias, epsilon, scale, FIXED)
        else:
            chosen_ids, chosen = _choose_by_softmax(row_logits, experts, inside, places, bias, FIXED)
    _store_chosen(weights, ids, shared_gate, row, num_tokens, stride_gate, chosen, chosen_ids, FIXED)


@launches(topk_router, invariant={})
def topk_router_triton(
    logits, top_k, *, renormalize, num_tokens, first_expert, num_experts, shared_expert, shared_gate, rule
) -> tuple[Tensor, Tensor]:
    """``topk_router`` of ``weft/ops/moe``."""
    sigmoid, bias, epsilon, scale, num_groups, top_groups, num_always = rule
    num_rows, all_experts = logits.shape
    assert logits.stride(1) == 1 and top_k <= all_experts // num_groups * top_groups
    assert num_always == 0 or (sigmoid and num_groups == 1)
    top_k += num_always
    places = top_k + shared_expert
    weights = torch.empty((num_rows, places), dtype=torch.float32, device=logits.device)
    ids = torch.empty((num_rows, places), dtype=torch.int32, device=logits.device)
    block_g = next_power_of_2(num_groups) if top_groups < num_groups else 1
    block_e = block_g * next_power_of_2(cdiv(all_experts, num_groups if block_g > 1 else 1))
    fixed = Fixed(
        first_expert, all_experts - first_expert if num_experts is None else num_experts, shared_expert, all_experts,
        top_k, num_groups, top_groups, renormalize, sigmoid, block_e, next_power_of_2(places), block_g, num_always,
    )  # fmt: skip
    count, number = (num_tokens, 0) if isinstance(num_tokens, Tensor) else (None, num_tokens)
    _router_kernel[(num_rows,)](
        logits, shared_gate, bias, weights, ids, count, number, logits.stride(0),
        0 if shared_gate is None else shared_gate.stride(0), epsilon, scale,
        FIXED=fixed, num_warps=1, **early_launch(logits.device),
    )  # fmt: skip
    return weights, ids
