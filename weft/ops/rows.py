"""Torch references row by row, so that no row's bits depend on the number of rows (``Backend.INVARIANT_TORCH``).

Job: run the body of an operation once for each token, or once for each chunk of a sequence. Owns: which arguments are
cut. Does not know: what an operation computes.

The matrix library chooses its algorithm by the shape, and vector loops treat the last elements of a tensor differently.
A row that is always computed alone, from memory that is aligned alike, has the same bits in any company.
"""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from weft.forward_context import Batch, ChunkTable, MixedBatch
from weft.ops.device_work import device_work

Reference = Callable[..., Any]


def whole(reference: Reference, *args: Any, **kwargs: Any) -> Any:
    """The body as it is: of integers and copies, or of operations whose rows are independent anyhow."""
    return reference(*args, **kwargs)


@functools.cache
def _signature(reference: Reference) -> inspect.Signature:
    return inspect.signature(reference)


def _named(reference: Reference, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    bound = _signature(reference).bind(*args, **kwargs).arguments
    return {name: value for name, value in bound.items() if name != "backend"}


def _alone(x: Tensor, first: int, count: int = 1) -> Tensor:
    """Rows in memory of their own."""
    return x[first : first + count].clone(memory_format=torch.contiguous_format)


def _together(results: list[Any]) -> Any:
    """The results of all rows, or tuples of them."""
    if isinstance(results[0], tuple):
        return tuple(_together(list(column)) for column in zip(*results, strict=True))
    return None if results[0] is None else torch.cat(results)


def by_row(*names: str) -> Callable[..., Any]:
    """Run an operation for each row of the arguments ``names``, the first of which is always there.

    ``a.b`` names field ``b`` of a named tuple. An argument ``out`` is written.
    """

    def run(reference: Reference, *args: Any, **kwargs: Any) -> Any:
        arguments = _named(reference, args, kwargs)
        count, out = arguments[names[0]].shape[0], arguments.get("out")
        if count == 0:
            return reference(**arguments)
        rows = []
        for i in range(count):
            row = arguments | _row(arguments, names, i)
            rows.append(reference(**row if out is None else row | {"out": out[i : i + 1]}))
        return _together(rows) if out is None else out

    return run


def by_sequence(*names: str) -> Callable[..., Any]:
    """Run an operation for each sequence. The arguments ``names`` have rows for each sequence, the last of them one."""

    def run(reference: Reference, *args: Any, **kwargs: Any) -> Any:
        arguments = _named(reference, args, kwargs)
        count = arguments[names[-1]].shape[0]
        each = {name: arguments[name].shape[0] // count for name in names} if count else {}
        cuts = [{name: _alone(arguments[name], i * size, size) for name, size in each.items()} for i in range(count)]
        return _together([reference(**arguments | cut) for cut in cuts]) if count else reference(**arguments)

    return run


def _row(arguments: Mapping[str, Any], names: tuple[str, ...], i: int) -> dict[str, Any]:
    cut: dict[str, Any] = {}
    for name in names:
        outer, _, field = name.partition(".")
        value = getattr(arguments.get(outer), field, None) if field else arguments.get(outer)
        if isinstance(value, Tensor):
            cut[outer] = arguments[outer]._replace(**{field: _alone(value, i)}) if field else _alone(value, i)
    return cut


def by_token(reference: Reference, *args: Any, **kwargs: Any) -> Tensor:
    """Run attention for each token, as a decode: ``q [T, H, D]``, ``out``. Results have ``rank`` columns, if given."""
    arguments = _named(reference, args, kwargs)
    batch, out, q = arguments.pop("batch"), arguments.pop("out", None), arguments["q"]
    run = _each_token(reference)
    if batch.mixed is None and batch.token_count is not None:  # a graph of decodes, whose lengths the device knows
        count = batch.seq_lens.shape[0]
        counts = torch.full((3,), count, dtype=torch.int32)
        batch = replace(batch, mixed=MixedBatch(counts, batch.state_slots, max_prefills=0))
    if batch.mixed is not None:
        out = q.new_empty(*q.shape[:2], arguments.get("rank", q.shape[2])) if out is None else out
        return device_work(run, batch, out, arguments)
    result = run(**arguments, batch=batch)
    return result if out is None else out.copy_(result)


@functools.cache
def _each_token(reference: Reference) -> Callable[..., Tensor]:
    def run(q: Tensor, batch: Batch, **others: Any) -> Tensor:
        out = q.new_zeros(*q.shape[:2], others.get("rank", q.shape[2]))
        bounds, lengths = batch.cu_seqlens_q.tolist(), batch.seq_lens.tolist()
        one, bias = torch.tensor([0, 1], dtype=torch.int32), others.pop("bias", None)
        for s in range(batch.num_seqs):
            begin, end = bounds[s : s + 2]
            for i in range(begin, end):
                length = lengths[s] - (end - 1 - i)
                alone = Batch(
                    num_tokens=1, num_seqs=1, num_decodes=1, max_query_len=1, max_seq_len=length,
                    positions=batch.positions[i : i + 1], slot_mapping=batch.slot_mapping[i : i + 1], cu_seqlens_q=one,
                    seq_lens=torch.tensor([length], dtype=torch.int32), page_table=batch.page_table[s : s + 1],
                    state_slots=batch.state_slots[s : s + 1],
                )  # fmt: skip
                added = {} if bias is None else {"bias": _alone(bias, i)}
                out[i : i + 1] = reference(q=_alone(q, i), batch=alone, **added, **others)
        return out

    run.__name__ = f"{_name(reference)}_each_token"
    return run


def _name(reference: Reference) -> str:
    return getattr(reference, "func", reference).__name__


def by_chunk(*names: str, states: tuple[str, ...]) -> Callable[..., Any]:
    """Run a recurrence for each chunk of each sequence of ``batch``, with the chunk's rows of the arguments ``names``.

    The result has the shape of the last of them. ``states`` are written.
    """
    kinds: dict[str, Any] = {}

    @functools.cache
    def each_chunk(reference: Reference) -> Callable[..., Tensor]:
        def run(batch: Batch, **arguments: Any) -> Tensor:
            for name, kind in kinds.items():
                if name not in arguments:
                    arguments[name] = kind(*(arguments.pop(f"{name}.{field}") for field in kind._fields))
            out = torch.zeros_like(arguments[names[-1]], memory_format=torch.contiguous_format)
            cut = [name for name in names if isinstance(arguments.get(name), Tensor)]
            for start, alone in _chunks(batch) if batch.chunks is not None else ():
                parts = {name: _alone(arguments[name], start, alone.num_tokens) for name in cut}
                out[start : start + alone.num_tokens] = reference(batch=alone, **arguments | parts)
            return out

        run.__name__ = f"{_name(reference)}_each_chunk"
        return run

    def call(reference: Reference, *args: Any, **kwargs: Any) -> Tensor:
        arguments = _named(reference, args, kwargs)
        run, batch = each_chunk(reference), arguments.pop("batch")
        if batch.mixed is None:
            return run(batch=batch, **arguments)
        for name in [name for name, value in arguments.items() if isinstance(value, tuple)]:
            parts = arguments.pop(name)  # a named tuple, but device work takes tensors alone
            arguments |= {f"{name}.{field}": part for field, part in parts._asdict().items()}
            kinds[name] = type(parts)
        written = {name: arguments.pop(name) for name in states}
        out = torch.empty_like(arguments[names[-1]], memory_format=torch.contiguous_format)
        return device_work(run, batch, out, arguments, written)

    return call


def _chunks(batch: Batch) -> Iterator[tuple[int, Batch]]:
    """Each chunk as a batch of its own, in order, with its first token."""
    chunks, bounds = batch.chunk_table, batch.cu_seqlens_q.tolist()
    first, lengths = chunks.first.tolist(), batch.seq_lens.tolist()
    starts, sizes, slots = chunks.start.tolist(), chunks.length.tolist(), chunks.checkpoint_slot.tolist()

    def ints(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32)

    for s in range(batch.num_decodes, batch.num_seqs):
        for i in range(first[s], first[s + 1]):
            start, size = starts[i], sizes[i]
            length = lengths[s] - (bounds[s + 1] - start - size)
            tokens = slice(start, start + size)
            table = ChunkTable(ints(0), ints(0), ints(size), ints(slots[i]), ints(0, 1), max_seqs=1)
            yield start, Batch(
                num_tokens=size, num_seqs=1, num_decodes=0, max_query_len=size, max_seq_len=length,
                positions=batch.positions[tokens], slot_mapping=batch.slot_mapping[tokens], cu_seqlens_q=ints(0, size),
                seq_lens=ints(length), page_table=batch.page_table[s : s + 1],
                state_slots=batch.state_slots[s : s + 1], chunks=table,
            )  # fmt: skip
