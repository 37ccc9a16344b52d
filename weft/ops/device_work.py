"""Torch references of operations that read sizes on the device: one recorded operation each.

Job: let a torch reference that reads lengths on the host take part in a captured step of any mixture of sequences, in
which host integers are those of the capture. Owns: the operation ``weft::device_work``. Does not know: what the
references compute, who records.

A GPU kernel reads the real sizes from device memory whenever its graph is replayed. On the CPU the emulator re-executes
operations, and this one does the same: it gets the batch as tensors and works out the host integers each time it runs.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from weft.forward_context import Batch, ChunkTable

_REFERENCES: dict[str, Callable[..., Tensor]] = {}
_LIBRARY = torch.library.Library("weft", "FRAGMENT")
_LIBRARY.define("device_work(str name, str plan, Tensor[] batch, Tensor[] inputs, Tensor(a!)[] written) -> ()")


def _run(name: str, plan: str, batch: Sequence[Tensor], inputs: Sequence[Tensor], written: Sequence[Tensor]) -> None:
    names, arguments = json.loads(plan)
    out, *states = written
    arguments |= zip(names, (*inputs, *states), strict=True)
    out.copy_(_REFERENCES[name](**arguments, batch=_from_tensors(batch)))


_LIBRARY.impl("device_work", _run, "CompositeExplicitAutograd")
torch.library.register_fake("weft::device_work", lambda *_: None, lib=_LIBRARY)


def device_work(
    reference: Callable[..., Tensor],
    batch: Batch,
    out: Tensor,
    given: Mapping[str, Any],
    states: Mapping[str, Tensor] | None = None,
) -> Tensor:
    """Write ``reference(**given, **states, batch=batch)`` into ``out``, for a captured batch (one with ``mixed``).

    Args:
        given: tensors, numbers and None, by parameter.
        states: tensors that the reference writes, by parameter.
    """
    name = getattr(reference, "func", reference).__name__  # that of an operation with a kernel is a partial function
    assert _REFERENCES.setdefault(name, reference) is reference, f"there are two references {name}"
    inputs = {key: value for key, value in given.items() if isinstance(value, Tensor)}
    others = {key: value for key, value in given.items() if key not in inputs}
    plan, written = json.dumps([[*inputs, *(states or {})], others]), [out, *(states or {}).values()]
    torch.ops.weft.device_work(name, plan, _to_tensors(batch), list(inputs.values()), written)
    return out


def _to_tensors(batch: Batch) -> list[Tensor]:
    assert batch.mixed is not None, "the batch knows its sizes on the host"
    tensors = [
        batch.mixed.counts, batch.positions, batch.slot_mapping,
        batch.cu_seqlens_q, batch.seq_lens, batch.page_table, batch.state_slots,
    ]  # fmt: skip
    if batch.chunks is not None:
        chunks = batch.chunks
        tensors += [chunks.seq, chunks.start, chunks.length, chunks.checkpoint_slot, chunks.first]
    return tensors


def _from_tensors(tensors: Sequence[Tensor]) -> Batch:
    """The batch with the sizes that its tensors hold now."""
    counts, positions, slot_mapping, cu_seqlens_q, seq_lens, page_table, state_slots, *of_chunks = tensors
    num_tokens, num_seqs, num_decodes = counts.tolist()
    chunks = None
    if of_chunks:
        seq, start, length, checkpoint_slot, first = of_chunks
        count = int((length > 0).sum())
        columns = seq[:count], start[:count], length[:count], checkpoint_slot[:count], first[: num_seqs + 1]
        chunks = ChunkTable(*columns, max_seqs=num_seqs - num_decodes)
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
