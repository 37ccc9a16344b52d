"""References of operations that verify drafts: decode steps, one token of every sequence after the other.

Does not know: what a step computes.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def decode_each_token(
    decode: Callable[..., Tensor], rows: Sequence[Tensor], states: Sequence[Tensor], state_slots: Tensor, slots: Tensor
) -> Tensor:
    """Decode steps on copies of the states, which go to their slots after each token.

    Args:
        decode: ``(*rows, *states, state_slots) -> [S, *]`` computes a token of each of S sequences, and advances the
            states in place.
        rows: ``[S * T, *]`` each, the tokens of a sequence side by side.
        states: ``[num_slots, *]`` each.
        state_slots: ``[S]`` integers, the slots with the states before these tokens; 0: the sequence is padding.
        slots: ``[S, T]`` integers, the slots that receive the states after each token; 0: nothing is kept.

    Returns:
        ``[S * T, *]``.
    """
    num_seqs, query_len = slots.shape
    read = torch.cat([state_slots.new_zeros(1), state_slots]).long()  # entry 0 is reserved, as in the caches
    local = torch.arange(1, num_seqs + 1, dtype=state_slots.dtype, device=state_slots.device) * (state_slots > 0)
    running, outputs = [state[read] for state in states], []
    for i in range(query_len):
        token = (x.unflatten(0, (num_seqs, query_len))[:, i].clone() for x in rows)
        outputs.append(decode(*token, *running, local))
        after = slots[:, i].long()
        for state, now in zip(states, running, strict=True):
            state[after] = now[1:]
    return torch.stack(outputs, dim=1).flatten(0, 1)
