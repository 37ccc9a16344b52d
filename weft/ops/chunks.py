"""The walk of a torch reference through the chunks of recurrent sequences: order, tokens, initial and stored states."""

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from weft.config.chunks import CHUNK_SIZE
from weft.forward_context import Batch


class ChunkWalk:
    """All chunks of the sequences from ``batch.num_decodes`` on, of which there is one at least.

    Chunks are ordered by their index within the sequence, longest sequence first. The chunks of one step of the state
    pass are then a slice, and the sequences with chunks left are a prefix.

    Attributes:
        tokens, valid: ``[chunks, size]``: token index and validity of every cell; invalid ones point at their chunk's
            first token.
    """

    def __init__(self, batch: Batch, state: Tensor) -> None:
        first, chunks, device = batch.num_decodes, batch.chunk_table, state.device
        order, sequences, self._widths = schedule(chunks.first.tolist()[first : batch.num_seqs + 1])
        chunk_ids, cells = torch.tensor(order, device=device), torch.arange(CHUNK_SIZE, device=device)
        self.valid = cells < chunks.length[chunk_ids, None]
        self.tokens = chunks.start[chunk_ids, None].long() + cells * self.valid
        seqs = torch.tensor(sequences, device=device) + first
        self._slots, self._state = batch.state_slots[seqs].long(), state
        continues = batch.seq_lens[seqs] != batch.cu_seqlens_q.diff()[seqs]
        self._running = torch.where(continues.view(-1, *[1] * (state.dim() - 1)), state[self._slots].float(), 0.0)
        self._checkpoint_slots = chunks.checkpoint_slot[chunk_ids].tolist()

    def cells(self, x: Tensor) -> Tensor:
        """``[T, H, D] -> [chunks, H, size, D]`` float32, invalid cells zero."""
        return torch.where(self.valid[:, :, None, None], x[self.tokens].float(), 0.0).transpose(1, 2)

    def steps(self) -> Iterator[tuple[slice, Tensor]]:
        """The chunks of each step, and the float32 states before them ``[sequences, ...]``, which the caller advances
        in place. States that the chunk table asks for are stored after each step, final ones at the end."""
        offset = 0
        for width in self._widths:
            step, live = slice(offset, offset + width), self._running[:width]
            yield step, live
            self._store_checkpoints(live, self._checkpoint_slots[step])
            offset += width
        self._state.index_copy_(0, self._slots, self._running.to(self._state.dtype))

    def _store_checkpoints(self, live: Tensor, slots: list[int]) -> None:
        rows = [i for i, slot in enumerate(slots) if slot >= 0]
        if rows:
            targets = torch.tensor([slots[i] for i in rows], device=live.device)
            self._state.index_copy_(0, targets, live[rows].to(self._state.dtype))


def schedule(first: list[int]) -> tuple[list[int], list[int], list[int]]:
    """Order the chunks for the state pass.

    Args:
        first: index of the first chunk of each sequence, and the end.

    Returns:
        Chunk ids in processing order; sequences (local index) by falling number of chunks; and for each step of the
        pass the number of sequences that still have a chunk.
    """
    counts = [b - a for a, b in pairwise(first)]
    sequences = sorted(range(len(counts)), key=lambda s: -counts[s])
    widths = [sum(c > i for c in counts) for i in range(max(counts))]
    order = [first[s] + i for i, width in enumerate(widths) for s in sequences[:width]]
    return order, sequences, widths
