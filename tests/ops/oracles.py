"""Slow, obvious definitions of the recurrent operations, and batches to run them on (tests only)."""

from __future__ import annotations

import torch
from torch import Tensor

from weft.config.chunks import CHUNK_SIZE
from weft.forward_context import Batch, ChunkTable

PAGE_SIZE = 4


def naive_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """Token by token, head by head, in the inputs' dtype.

    Args: one sequence: q, k ``[T, HK, K]``, v ``[T, HV, V]``, g, beta ``[T, HV]``, state ``[HV, K, V]``.

    Returns: ``o [T, HV, V]`` and the state after each token.
    """
    num_tokens, num_v_heads, _ = v.shape
    group = num_v_heads // k.shape[1]
    out, states = torch.empty_like(v), []
    state = state.clone()
    for t in range(num_tokens):
        for h in range(num_v_heads):
            query, key = q[t, h // group], k[t, h // group]
            query = query / torch.sqrt((query * query).sum() + 1e-6) / query.shape[0] ** 0.5
            key = key / torch.sqrt((key * key).sum() + 1e-6)
            decayed = state[h] * g[t, h].exp()
            delta = beta[t, h] * (v[t, h] - key @ decayed)
            state[h] = decayed + torch.outer(key, delta)
            out[t, h] = query @ state[h]
        states.append(state.clone())
    return out, states


def naive_conv1d(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor) -> tuple[Tensor, list[Tensor]]:
    """One sequence: x ``[T, C]``, weight ``[C, W]``, state ``[C, W - 1]``; outputs and the state after each token."""
    out, states = torch.empty_like(x), []
    for t in range(x.shape[0]):
        window = torch.cat([state, x[t][:, None]], dim=1)
        y = (window * weight).sum(1)
        y = y if bias is None else y + bias
        out[t] = y * torch.sigmoid(y)
        state = window[:, 1:]
        states.append(state.clone())
    return out, states


def chunk_lengths(query_len: int, boundaries: list[int]) -> list[int]:
    """Chunks of at most 64 tokens with a boundary after each given number of tokens."""
    lengths, begin = [], 0
    for end in sorted({*boundaries, query_len}):
        while begin < end:
            lengths.append(min(CHUNK_SIZE, end - begin))
            begin += lengths[-1]
    return lengths


def make_batch(
    query_lens: list[int],
    context_lens: list[int],
    *,
    num_decodes: int = 0,
    checkpoints: dict[int, dict[int, int]] | None = None,
    pad_tokens: int = 0,
    pad_seqs: int = 0,
    pad_chunks: int = 0,
) -> Batch:
    """A batch with scattered pages; sequence ``s`` has state slot ``s + 1``.

    ``checkpoints[s]`` maps a number of tokens of this step to the slot that receives the state there.
    """
    checkpoints = checkpoints or {}
    count = len(query_lens)
    seq_lens = [q + c for q, c in zip(query_lens, context_lens, strict=True)]
    pages_of = [-(-n // PAGE_SIZE) for n in seq_lens]
    ids = (torch.randperm(sum(pages_of), generator=torch.Generator().manual_seed(1)) + 1).tolist()
    page_table = torch.zeros(count + pad_seqs, max(pages_of) + 1, dtype=torch.int32)
    positions, slots, starts = [], [], [0]
    for s, n in enumerate(pages_of):
        mine, ids = ids[:n], ids[n:]
        page_table[s, :n] = torch.tensor(mine)
        for p in range(context_lens[s], seq_lens[s]):
            positions.append(p)
            slots.append(mine[p // PAGE_SIZE] * PAGE_SIZE + p % PAGE_SIZE)
        starts.append(starts[-1] + query_lens[s])
    table: list[tuple[int, int, int, int]] = []
    first = [0]
    for s in range(count):
        if s >= num_decodes:
            done = 0
            for length in chunk_lengths(query_lens[s], list(checkpoints.get(s, {}))):
                slot = checkpoints.get(s, {}).get(done + length, -1)
                table.append((s, starts[s] + done, length, slot))
                done += length
        first.append(len(table))
    table += [(0, 0, 0, -1)] * pad_chunks
    columns = [torch.tensor(c, dtype=torch.int32) for c in zip(*table, strict=True)] if table else None
    chunks = None
    if columns is not None and num_decodes < count:
        firsts = torch.tensor(first + [first[-1]] * pad_seqs, dtype=torch.int32)
        chunks = ChunkTable(*columns, firsts, max_seqs=count - num_decodes)
    return Batch(
        num_tokens=starts[-1],
        num_seqs=count,
        num_decodes=num_decodes,
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
        positions=torch.tensor(positions + [0] * pad_tokens),
        slot_mapping=torch.tensor(slots + [0] * pad_tokens),
        cu_seqlens_q=torch.tensor(starts + [starts[-1]] * pad_seqs, dtype=torch.int32),
        seq_lens=torch.tensor(seq_lens + [0] * pad_seqs, dtype=torch.int32),
        page_table=page_table,
        state_slots=torch.tensor([*range(1, count + 1)] + [0] * pad_seqs, dtype=torch.int32),
        chunks=chunks,
    )
