"""One or a few tokens of each row by the delta rule, with Gated DeltaNet or Kimi Delta Attention: which kernels run.

Job: ``gdn_decode``, ``gdn_verify``, ``kda_decode`` and ``kda_verify`` on the GPU. Owns: the choice among the kernels of
``decode.py`` and ``verify.py``. Does not know: layers.
"""

from collections.abc import Callable
from functools import partial

from torch import Tensor

from weft.config.gated_delta_net import GatedDeltaNetConfig
from weft.config.kimi import KimiDeltaConfig
from weft.ops.backend import launches
from weft.ops.delta_rule import DeltaWeights, gdn_decode, gdn_verify, kda_decode, kda_verify
from weft.ops.delta_rule.decode import Shape, choose_kda_shape, choose_shape, launch_rows
from weft.ops.delta_rule.verify import Inputs, launch_of_states, launch_verify, serves_decodes

_CONVOLUTIONS = Shape(64, 4, False, None)
"""Shape of programs that read no states."""


def as_delta_net(geometry: KimiDeltaConfig) -> GatedDeltaNetConfig:
    """Heads and sizes of Kimi Delta Attention, as the kernels take them."""
    heads, dim = geometry.num_heads, geometry.head_dim
    return GatedDeltaNetConfig(heads, heads, dim, dim, geometry.conv_kernel, sigmoid_gate=True)


@launches(gdn_decode, invariant={"alone": True})
def gdn_decode_triton(
    projected,
    weights,
    conv_state,
    state,
    state_slots,
    geometry,
    *,
    out,
    shape: Shape | None = None,
    alone: bool = False,
) -> Tensor:
    """Triton kernel of ``gdn_decode``; all arithmetic in float32, rounded at the stores only.

    ``shape`` overrides the choice of ``choose_shape`` (tests and measurements). ``alone``: any number of rows runs in
    this kernel, whose shapes all sum in the same order.
    """
    num_rows, g, inputs = projected.shape[0], geometry, Inputs(projected)
    if shape is None and out is None and not alone and serves_decodes(state, projected.dtype, num_rows):
        return launch_verify(inputs, weights, conv_state, state, state_slots, state_slots[:, None], geometry)
    keep, out = out is not None, projected.new_empty(num_rows, g.value_dim) if out is None else out
    assert out.is_contiguous(), "out must be contiguous"
    shape = shape or choose_shape(num_rows * g.num_k_heads, state.dtype, is_wide=g.head_v_dim > 128 and not alone)
    launch_rows(inputs, weights, (conv_state, state), (state_slots, state_slots), g, shape, out, keep)
    return out


def _verify(
    inputs: Inputs, weights: DeltaWeights, states: tuple[Tensor, Tensor], state_slots: Tensor, slots: Tensor,
    g: GatedDeltaNetConfig, choose: Callable[[int], Shape], alone: bool,
) -> Tensor:  # fmt: skip
    """A verification. ``alone``: by the decode kernel, token after token, since the other one sums in another order.
    ``choose`` gives its shape for a number of programs."""
    if not alone:
        return launch_verify(inputs, weights, *states, state_slots, slots, g)
    num_seqs, num_tokens = slots.shape
    shape = choose(num_seqs * g.num_k_heads)
    out = inputs.projected.new_empty(num_seqs * num_tokens, g.value_dim)
    for i in range(num_tokens):
        places = (slots[:, i - 1] if i else state_slots, slots[:, i])
        # A program reads states before it waits, so only the first launch may start early.
        rows = inputs.every(i, num_tokens), weights, states, places
        launch_rows(*rows, g, shape, out[i::num_tokens], False, early=i == 0)
    return out


@launches(gdn_verify, invariant={"alone": True})
def gdn_verify_triton(
    projected, weights, conv_state, state, state_slots, slots, geometry, *, alone: bool = False
) -> Tensor:
    """``gdn_verify``; ``alone``: see ``_verify``."""
    states = (conv_state, state)
    choose = partial(choose_shape, state_dtype=state.dtype)
    return _verify(Inputs(projected), weights, states, state_slots, slots, geometry, choose, alone)


@launches(kda_decode, invariant={"choose": choose_kda_shape})
def kda_decode_triton(
    projected,
    f,
    gate,
    weights,
    conv_state,
    state,
    state_slots,
    geometry,
    *,
    out,
    choose: Callable[[int], Shape] | None = None,
) -> Tensor:
    """``kda_decode``, in one launch, or in two where ``launch_of_states`` has one for states.

    ``choose`` gives the shape for a number of programs, and any number of rows then runs in one launch. The shapes all
    sum in the same order.
    """
    num_rows, inputs = projected.shape[0], Inputs(projected, f, gate, geometry.gate_floor)
    launch_states = None
    if out is None and choose is None:
        launch_states = launch_of_states(state, projected.dtype, num_rows, 1)
    keep, out = out is not None, projected.new_empty(num_rows, geometry.width) if out is None else out
    assert out.is_contiguous(), "out must be contiguous"
    is_one_launch = launch_states is None
    shape = (choose or choose_kda_shape)(num_rows * geometry.num_heads) if is_one_launch else _CONVOLUTIONS
    slots, g = (state_slots, state_slots), as_delta_net(geometry)
    launch_rows(inputs, weights, (conv_state, state), slots, g, shape, out, keep, launch_states=launch_states)
    return out


@launches(kda_verify, invariant={"alone": True})
def kda_verify_triton(
    projected, f, gate, weights, conv_state, state, state_slots, slots, geometry, *, alone: bool = False
) -> Tensor:
    """``kda_verify``; ``alone``: see ``_verify``."""
    inputs, g = Inputs(projected, f, gate, geometry.gate_floor), as_delta_net(geometry)
    return _verify(inputs, weights, (conv_state, state), state_slots, slots, g, choose_kda_shape, alone)
