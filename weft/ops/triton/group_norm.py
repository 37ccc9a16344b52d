"""The gated RMSNorm by group as one kernel: a program has one row's group."""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from weft.ops.triton.early_launch import ALWAYS, early_launch, release, wait
from weft.ops.triton.elementwise import sigmoid
from weft.ops.triton.launch import jit
from weft.ops.triton.sizes import next_power_of_2


@jit(do_not_specialize_on_alignment=["state_slots"])
def _group_norm_kernel(
    x, gate, weight, state_slots, out, stride_gate, eps,
    C: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr, NORM_FIRST: tl.constexpr,
    HAS_SLOTS: tl.constexpr, KEEP: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Channels of one group of one row; with slots, rows without one become zeros or are kept."""
    release(EARLY, ALWAYS)
    i_row = tl.program_id(1).to(tl.int64)
    inside = tl.arange(0, BLOCK)
    mask = inside < GROUP
    channels = tl.program_id(0) * GROUP + inside
    p_out = out + i_row * C + channels
    if NORM:
        b_weight = tl.load(weight + channels, mask=mask, other=0.0).to(tl.float32)
    wait(EARLY)
    if HAS_SLOTS:  # noqa: SIM102 (known to the compiler, so not one condition with the next)
        if tl.load(state_slots + i_row) == 0:
            if not KEEP:
                tl.store(p_out, tl.zeros([BLOCK], out.dtype.element_ty), mask=mask)
            return
    y = tl.load(x + i_row * C + channels, mask=mask, other=0.0).to(tl.float32)
    factor = tl.load(gate + i_row * stride_gate + channels, mask=mask, other=0.0).to(tl.float32)
    factor *= sigmoid(factor)
    if not NORM_FIRST:
        y *= factor
    if NORM:
        y *= tl.rsqrt(tl.sum(y * y, 0) / GROUP + eps) * b_weight
    if NORM_FIRST:
        y *= factor
    tl.store(p_out, y.to(out.dtype.element_ty), mask=mask)


def gated_group_norm_triton(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    eps: float,
    num_groups: int,
    *,
    norm_before_gate: bool = False,
    state_slots: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Triton kernel of ``gated_group_norm``. With ``state_slots [N]``, rows with slot 0 are zero, or left as they are
    in a given ``out``."""
    num_rows, num_channels = x.shape
    assert x.is_contiguous() and gate.stride(1) == 1 and x.shape == gate.shape
    keep, out = out is not None, x.new_empty(x.shape) if out is None else out
    assert out.is_contiguous(), "out must be contiguous"
    if weight is None:
        num_groups = -(-num_channels // 1024)  # any split does
        while num_channels % num_groups:
            num_groups += 1
    group = num_channels // num_groups
    if num_rows:
        block = next_power_of_2(group)
        _group_norm_kernel[(num_groups, num_rows)](
            x, gate, weight, state_slots, out, gate.stride(0), eps,
            C=num_channels, GROUP=group, BLOCK=block, NORM=weight is not None,
            NORM_FIRST=norm_before_gate and weight is not None, HAS_SLOTS=state_slots is not None, KEEP=keep,
            num_warps=4 if block <= 4096 else 8, **early_launch(x.device),
        )  # fmt: skip
    return out
