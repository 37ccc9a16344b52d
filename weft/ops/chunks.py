"""Helpers of the torch references of chunked recurrences: order of chunks, their tokens, checkpoint stores."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from weft.forward_context import ChunkTable


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


def token_grid(chunks: ChunkTable, chunk_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Token index and validity of every cell, ``[chunks, size]``; invalid cells point at their chunk's first token."""
    cells = torch.arange(chunks.size, device=chunk_ids.device)
    valid = cells < chunks.length[chunk_ids, None]
    return chunks.start[chunk_ids, None].long() + cells * valid, valid


def store_checkpoints(state: Tensor, live: Tensor, checkpoint_slots: list[int]) -> None:
    """Write the running states ``live [sequences, ...]`` of one step of the pass to their slots; -1: none."""
    rows = [i for i, slot in enumerate(checkpoint_slots) if slot >= 0]
    if rows:
        slots = torch.tensor([checkpoint_slots[i] for i in rows], device=state.device)
        state.index_copy_(0, slots, live[rows].to(state.dtype))
