"""``kda_decode`` on the GPU: the decode step of Kimi Delta Attention in one launch, or in two.

The kernel is that of Gated DeltaNet (``gdn_decode.py``): queries, keys and values have the same heads, so a program
serves one row and one head, and a state decays by a number per key channel. Where it takes less time the states have a
launch of their own, also that of Gated DeltaNet (``gdn_verify.py``).
"""

from __future__ import annotations

import torch
from torch import Tensor

from weft.config.kimi import KimiDeltaConfig
from weft.ops.triton.delta_vectors import vectors_of
from weft.ops.triton.early_launch import ALWAYS, early_launch
from weft.ops.triton.gdn_decode import Fixed, Shape, gdn_decode_kernel
from weft.ops.triton.gdn_verify import launch_of_states
from weft.ops.triton.sizes import next_power_of_2

_FEW_PROGRAMS = 1024
"""Up to so many, 32 rows of 32 heads, a program hides its own latency best (measured on an H200)."""

_FEW_TO_RELEASE = 512
"""Up to so many, 16 rows of 32 heads, a step gains from the next kernel's early start; with more it loses, because that
kernel's programs take places (measured on an H200)."""


def choose_shape(num_programs: int) -> Shape:
    """Few programs load the next tile ahead; of many, three share a multiprocessor."""
    return Shape(64, 4, True, None) if num_programs <= _FEW_PROGRAMS else Shape(64, 4, False, 160)


_CONVOLUTIONS = Shape(64, 4, False, None)
"""Of programs that read no states."""


def kda_decode_triton(
    projected: Tensor,
    f: Tensor,
    gate: Tensor,
    conv_weight: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor,
    eps: float,
    conv_state: Tensor,
    state: Tensor,
    state_slots: Tensor,
    geometry: KimiDeltaConfig,
    *,
    out: Tensor | None = None,
    shape: Shape | None = None,
) -> Tensor:
    """``kda_decode`` of ``weft/ops/kda.py``. ``shape`` overrides that of ``choose_shape`` (tests and measurements)."""
    heads, dim, num_rows = geometry.num_heads, geometry.head_dim, projected.shape[0]
    assert projected.stride(1) == f.stride(1) == gate.stride(1) == 1
    assert state.is_contiguous() and conv_state.is_contiguous() and conv_weight.is_contiguous()
    assert out is None or out.is_contiguous()
    launch_states = launch_of_states(state, projected.dtype, num_rows, 1) if out is None and shape is None else None
    keep, out = out is not None, projected.new_empty(num_rows, geometry.width) if out is None else out
    if num_rows:
        if shape is None:
            shape = _CONVOLUTIONS if launch_states is not None else choose_shape(num_rows * heads)
        block = next_power_of_2(dim)
        places = vectors_of(1, dim, dim, channels=dim)
        vectors = projected.new_empty(num_rows, heads, places.size, dtype=torch.float32)
        has_states = launch_states is None  # else the launch of states is what starts early
        fixed = Fixed(
            heads, heads, dim, dim, geometry.conv_kernel, block, min(shape.block_v, block), block, 1, places, keep,
            shape.prefetch, negative_eigenvalues=False, has_states=has_states,
            most_to_release=_FEW_TO_RELEASE if has_states else ALWAYS.value,
        )  # fmt: skip
        gdn_decode_kernel[(heads, num_rows)](
            projected, f, gate, conv_weight, A_log, dt_bias, norm_weight, conv_state, state, state_slots, vectors, out,
            projected.stride(0), f.stride(0), gate.stride(0), eps,
            FIXED=fixed, num_warps=shape.warps, maxnreg=shape.max_registers, **early_launch(projected.device),
        )  # fmt: skip
        if launch_states is not None:
            launch_states(vectors, state, state_slots, state_slots[:, None], out, eps, places)
    return out
