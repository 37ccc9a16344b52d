"""The frame that recurrent layers share, and their batches.

In a batch, decodes come first and advance by one token; the rest are prefills.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from weft.forward_context import Batch
from weft.layers.context import ModelContext
from weft.layers.linear import LinearBase, RowParallelLinear
from weft.layers.weight import RECURRENCE_RANGES, WeightLayout, WeightModule


class RecurrentLayer(WeightModule):
    """``hidden_states [T, hidden_size] -> [T, hidden_size]``, this rank's part of the sum; padding rows are zero.

    The layer has the modules ``in_proj`` and ``out_proj``, and a split op ``mix`` between them.

    Args:
        name: key of the layer's states and of its entry in the layer table, for example ``model.layers.0.mamba``.
    """

    in_proj: LinearBase
    out_proj: RowParallelLinear
    mix: Callable[..., Tensor]

    def __init__(self, context: ModelContext, name: str) -> None:
        super().__init__()
        self.name, self._backend = name, context.backend
        context.layers.register(name, self)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.out_proj(self.mix(self.in_proj(hidden_states)))

    def layouts(self) -> tuple[WeightLayout, ...]:
        return ({},)

    def initial_range(self, name: str) -> tuple[float, float]:
        return RECURRENCE_RANGES[name] if name in RECURRENCE_RANGES else super().initial_range(name)


def decode_slots(batch: Batch) -> Tensor:
    """Return the state slots of the leading rows that decode; in a captured mixed batch, of all rows that may."""
    return batch.state_slots[: batch.num_decodes] if batch.mixed is None else batch.mixed.decode_slots


def mix_rows(
    inputs: Sequence[Tensor],
    states: Sequence[Tensor],
    batch: Batch,
    shape: Sequence[int],
    decode: Callable[..., Tensor],
    prefill: Callable[..., Tensor],
    verify: Callable[..., Tensor] | None = None,
) -> Tensor:
    """Compute all rows of a batch: decodes by one function, the rest by another.

    Args:
        inputs: ``[T, *]`` each, all with one row per token; the first has the dtype of the result.
        states: tensors of the layer, by slot, that ``decode`` reads and writes.
        decode: ``(*inputs, slots=, out=)`` computes the first rows, one token of an existing state each. Rows with
            slot 0 are padding. ``decode`` returns zeros there, but does not write them to a given ``out``.
        prefill: ``(*inputs)`` computes all rows. Rows that belong to no chunk are zero in its result: decodes, which
            ``decode`` then overwrites, and padding.
        verify: ``(*inputs, state_slots, slots)`` computes a verification: a few tokens of each sequence, with the
            states after each in ``slots`` (``Verification``). Its padding rows are zero. None: ``decode`` does, token
            after token.

    Returns:
        ``[T, *shape]``; padding rows are zero.
    """
    if batch.verification is not None:
        places = batch.state_slots, batch.verification.slots
        return _verify_rows(inputs, states, *places, decode) if verify is None else verify(*inputs, *places)
    slots, rows = decode_slots(batch), inputs[0].shape[0]
    if batch.num_decodes == rows:
        return decode(*inputs, slots=slots, out=None)
    mixed = prefill(*inputs) if batch.chunks else inputs[0].new_zeros(rows, *shape)
    count = slots.shape[0]
    if count:
        decode(*(x[:count] for x in inputs), slots=slots, out=mixed[:count])
    return mixed


def _verify_rows(
    inputs: Sequence[Tensor], states: Sequence[Tensor], before: Tensor, slots: Tensor, decode: Callable[..., Tensor]
) -> Tensor:
    """Decode token after token, on copies of the states in the ``slots [S, query_len]`` of each token.

    Kernels that decode may read states before the kernel in front of them has ended. Copies of a token's inputs
    therefore come after those of states.
    """
    outputs = []
    for i, after in enumerate(slots.long().unbind(1)):
        for state in states:
            state[after] = state[before.long()]
        rows = [x[i :: slots.shape[1]].clone(memory_format=torch.contiguous_format) for x in inputs]
        before = slots[:, i].contiguous()
        outputs.append(decode(*rows, slots=before, out=None))
    return torch.stack(outputs, 1).flatten(0, 1)
