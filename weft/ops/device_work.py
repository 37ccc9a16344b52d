"""Torch references of operations that read sizes on the device: one recorded operation each.

Job: let a torch reference that reads lengths on the host take part in a captured step of any mixture of sequences, in
which host integers are those of the capture. Owns: the operation ``weft::device_work``. Does not know: what the
references compute, who records.

A GPU kernel reads the real sizes from device memory whenever its graph is replayed. On the CPU the emulator re-executes
operations, and this one does the same: it gets the batch as tensors and works out the host integers each time it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from weft.forward_context import Batch, ChunkTable

Reference = Callable[[Batch, Sequence[Tensor], Sequence[Tensor]], None]
"""``(batch, inputs, outputs)``: writes the outputs."""

_REFERENCES: dict[str, Reference] = {}
_LIBRARY = torch.library.Library("weft", "FRAGMENT")
_LIBRARY.define("device_work(str name, Tensor[] batch, int chunk_size, Tensor[] inputs, Tensor(a!)[] outputs) -> ()")


def _run(
    name: str, batch: Sequence[Tensor], chunk_size: int, inputs: Sequence[Tensor], outputs: Sequence[Tensor]
) -> None:
    _REFERENCES[name](_from_tensors(batch, chunk_size), inputs, outputs)


_LIBRARY.impl("device_work", _run, "CompositeExplicitAutograd")
torch.library.register_fake("weft::device_work", lambda *_: None, lib=_LIBRARY)


def device_reference(name: str) -> Callable[[Reference], Reference]:
    """Register a reference under ``name``."""

    def register(function: Reference) -> Reference:
        assert name not in _REFERENCES, f"{name} is registered twice"
        _REFERENCES[name] = function
        return function

    return register


def device_work(
    name: str, batch: Batch, inputs: Sequence[Tensor], outputs: Sequence[Tensor], *, chunk_size: int = 0
) -> None:
    """Run a registered reference on a captured batch (one with a ``mixture``) and the tensors that it writes.

    Args:
        chunk_size: which of the batch's chunk tables the reference reads; 0: none.
    """
    torch.ops.weft.device_work(name, _to_tensors(batch, chunk_size), chunk_size, list(inputs), list(outputs))


def _to_tensors(batch: Batch, chunk_size: int) -> list[Tensor]:
    assert batch.mixture is not None, "the batch knows its sizes on the host"
    tensors = [
        batch.mixture.counts, batch.positions, batch.slot_mapping,
        batch.cu_seqlens_q, batch.seq_lens, batch.page_table, batch.state_slots,
    ]  # fmt: skip
    if chunk_size:
        chunks = batch.chunks[chunk_size]
        tensors += [chunks.seq, chunks.start, chunks.length, chunks.checkpoint_slot, chunks.first]
    return tensors


def _from_tensors(tensors: Sequence[Tensor], chunk_size: int) -> Batch:
    """The batch with the sizes that its tensors hold now."""
    counts, positions, slot_mapping, cu_seqlens_q, seq_lens, page_table, state_slots = tensors[:7]
    num_tokens, num_seqs, num_decodes = counts.tolist()
    chunks = {}
    if chunk_size:
        seq, start, length, checkpoint_slot, first = tensors[7:]
        count = int((length > 0).sum())
        seq, start, length, checkpoint_slot = seq[:count], start[:count], length[:count], checkpoint_slot[:count]
        max_seqs = num_seqs - num_decodes
        columns = (seq, start, length, checkpoint_slot, first[: num_seqs + 1])
        chunks = {chunk_size: ChunkTable(chunk_size, *columns, max_seqs)}
    return Batch(
        num_tokens=num_tokens,
        num_seqs=num_seqs,
        num_decodes=num_decodes,
        max_query_len=int(cu_seqlens_q.diff().max()),
        max_seq_len=int(seq_lens.max()),
        positions=positions,
        slot_mapping=slot_mapping,
        cu_seqlens_q=cu_seqlens_q[: num_seqs + 1],
        seq_lens=seq_lens[:num_seqs],
        page_table=page_table[:num_seqs],
        state_slots=state_slots[:num_seqs],
        chunks=chunks,
    )
