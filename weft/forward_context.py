"""The forward context: the batch's metadata and each layer's cache, for one forward pass.

Job: give the layers access to the metadata of the running batch, the caches and the layer table, without passing them
through every ``forward``. Token mixers read all three; a mixture of experts reads the number of real rows. Owns: the
scope (exactly one context at a time; nesting is refused). Does not know: how batches are built, schedulers, graphs.
torch is imported for type checking only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class ChunkTable:
    """The chunks of the prefill sequences of a batch, for recurrent layers.

    All tensors are int32 on the batch's device. Chunks of one sequence are consecutive and in order; sequences are in
    batch order. Chunks end at absolute multiples of ``CHUNK_SIZE``, and wherever a state has to be stored, so chunks
    may be shorter.

    Attributes:
        seq: ``[num_chunks]`` index of the chunk's sequence in the batch (row of ``cu_seqlens_q``, ``state_slots``).
        start: ``[num_chunks]`` first token of the chunk, as an index into the batch's flat token axis.
        length: ``[num_chunks]`` tokens in the chunk, 1 to ``CHUNK_SIZE``; 0 for padding chunks.
        checkpoint_slot: ``[num_chunks]`` slot that receives the state *after* the chunk's last token, or -1.
        first: ``[num_seqs + 1]`` index of the first chunk of each sequence (a prefix sum; decode rows have none).
        max_seqs: upper bound on sequences with chunks. A captured graph serves any number up to it.
    """

    seq: Tensor
    start: Tensor
    length: Tensor
    checkpoint_slot: Tensor
    first: Tensor
    max_seqs: int


@dataclass(frozen=True, slots=True)
class MixedBatch:
    """Real sizes of a batch, read on the device, in a captured graph that serves any mixture of sequences.

    Attributes:
        counts: ``[3]`` int32: numbers of tokens, of sequences, and of sequences that decode (they come first).
        decode_slots: ``[S]`` int32, state slots of the sequences that decode, and 0 for the others.
        max_prefills: upper bound on sequences that do not decode. 0: all sequences decode, and the values of padding
            rows are arbitrary.
    """

    counts: Tensor
    decode_slots: Tensor
    max_prefills: int


@dataclass(frozen=True, slots=True)
class Verification:
    """A batch in which drafts are verified: every sequence has the same number of tokens and continues a state.

    Attributes:
        query_len: number of tokens of each sequence: its drafts and one more. Token ``i`` belongs to sequence ``i //
            query_len``.
        slots: ``[S, query_len]`` int32, the slot for the state after each token; 0: the state is not stored. A sequence
            with fewer drafts ends in padding tokens. Its working slot, which holds the state before the step, may be
            among its slots. Padding sequences: all 0.
    """

    query_len: int
    slots: Tensor


@dataclass(frozen=True, slots=True)
class LogitsRows:
    """The rows of a batch from which a token may be sampled: the last token of every sequence. The last layer computes
    no other rows beyond what its caches need.

    Attributes:
        indices: ``[S]`` int64, on the flat token axis. A padding sequence has the index of any other row.
        batch: a batch of these rows alone, with one token per sequence.
    """

    indices: Tensor
    batch: Batch

    def of(self, x: Tensor, dim: int = 0) -> Tensor:
        """Select these rows of ``[T, *]``, or of another dimension."""
        return x.index_select(dim, self.indices)


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's metadata. ``T`` and ``S`` are padded token and sequence counts; the real ones are host integers.

    Tokens of one sequence are contiguous. Sequences that decode (one token, an existing state, no checkpoint to store)
    come first, so token ``i`` belongs to sequence ``i`` for ``i < num_decodes``.

    Padding has two forms. A batch padded for a decode graph has padding *sequences* that count as real: one token each,
    state slot 0, position 0 of page 0 (both are reserved). A batch padded for any other graph has padding *tokens*,
    which belong to no sequence, and padding sequences without tokens. Attention writes the keys and values of padding
    tokens to page 0. Recurrent layers touch no slot for them and leave zeros in their output. A mixture of experts
    sends rows from ``num_tokens`` (or ``token_count``, if set) on to no expert. Other layers compute arbitrary values.

    Attributes:
        num_tokens: real tokens in the batch, at most ``T``.
        num_seqs: real sequences, at most ``S``.
        num_decodes: number of leading sequences with exactly one token that only continue their state.
        max_query_len: upper bound on tokens of one sequence in this step.
        max_seq_len: length of the longest sequence after this step, in tokens (a bound on the KV that is read).
        positions: ``[T]`` int64, position of each token in its sequence.
        slot_mapping: ``[T]`` int64, ``page * page_size + offset`` of the token's KV.
        cu_seqlens_q: ``[S + 1]`` int32, prefix sum of tokens per sequence; padding sequences have none.
        seq_lens: ``[S]`` int32, length of each sequence after this step (0 for padding).
        page_table: ``[S, max_pages]`` int32, page ids of each sequence; unused entries are 0.
        state_slots: ``[S]`` int32, working slot of the recurrent state of each sequence. The slot holds the state after
            the tokens before this step. If the sequence starts here (``seq_lens`` equals its query length), the slot's
            content is ignored and a zero state is used.
        chunks: chunks of the sequences from ``num_decodes`` on; None if the model has no recurrent layers or every
            sequence decodes.
        token_count: ``[1]`` int32, the real number of tokens, in a captured graph whose host integers (above) count
            rows beyond it as real; None otherwise.
        verification: set if every sequence verifies drafts. No sequence counts as a decode then.
        may_have_media: whether tokens of images may be among them, whose ids follow the vocabulary's
            (``models/vision_language.py``). A captured graph that serves such tokens always sets it.
        mixed: real sizes on the device, in a captured graph that serves any mixture of decodes and prefills; None
            otherwise.
        logits_rows: set if the model returns the hidden states of these rows alone; None: of all rows.
        num_prefill_keys: tokens after this step of all sequences that do not decode, and
        least_chunk: fewest tokens in this step of a sequence that neither decodes nor begins, or ``num_tokens`` without
            such a sequence; both None where the host does not know.
    """

    num_tokens: int
    num_seqs: int
    num_decodes: int
    max_query_len: int
    max_seq_len: int
    positions: Tensor
    slot_mapping: Tensor
    cu_seqlens_q: Tensor
    seq_lens: Tensor
    page_table: Tensor
    state_slots: Tensor
    chunks: ChunkTable | None = None
    token_count: Tensor | None = None
    mixed: MixedBatch | None = None
    verification: Verification | None = None
    may_have_media: bool = False
    logits_rows: LogitsRows | None = None
    num_prefill_keys: int | None = None
    least_chunk: int | None = None

    @property
    def chunk_table(self) -> ChunkTable:
        """The ``chunks`` of a batch that has some."""
        assert self.chunks is not None, "every sequence of the batch decodes"
        return self.chunks


LayerCache = Mapping[str, "Tensor"]
"""A layer's cache tensors by their names in its ``LayerSpec``: paged ones ``[num_pages, page_size, *shape]``, states
``[num_slots, *shape]``."""


def cache_tensors(caches: Mapping[str, LayerCache]) -> dict[str, Tensor]:
    """Return every tensor of ``caches`` by name: ``layer.tensor``."""
    return {f"{layer}.{name}": tensor for layer, cache in caches.items() for name, tensor in cache.items()}


class Breaks(Protocol):
    """The split ops ``names``, at which a pass is captured or traced in pieces."""

    names: frozenset[str]

    def at(self, op: Any, layer: Any, inputs: tuple[Tensor, ...]) -> Tensor:
        """Note the call ``op(layer, *inputs)`` instead of running it. Returns the memory for its output."""
        ...


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """The values that a forward pass may look up.

    Attributes:
        batch: the step's metadata.
        caches, layers: by layer name, the layer's cache and the layer itself.
        breaks: set while pieces are captured or traced; split ops report to it instead of running.
        any_num_tokens: whether the pass stands for every number of tokens. A layer with a second algorithm for few rows
            must not choose that algorithm then.
    """

    batch: Batch
    caches: Mapping[str, LayerCache]
    layers: Mapping[str, Any] = field(default_factory=dict)
    breaks: Breaks | None = None
    any_num_tokens: bool = False


_current: ForwardContext | None = None


def active_breaks() -> Breaks | None:
    return _current.breaks if _current is not None else None


def serves_any_num_tokens() -> bool:
    return _current is not None and _current.any_num_tokens


@contextmanager
def forward_context(context: ForwardContext) -> Iterator[ForwardContext]:
    """Make ``context`` the current one for the body.

    Raises:
        RuntimeError: another context is already active (forward passes do not nest).
    """
    global _current
    if _current is not None:
        raise RuntimeError("a forward context is already active; forward passes do not nest")
    _current = context
    try:
        yield context
    finally:
        _current = None


@contextmanager
def other_batch(batch: Batch) -> Iterator[None]:
    """Make the current context with another batch current for the body: a further pass over a part of the model, with
    the same caches."""
    global _current
    before = get_forward_context()
    _current = replace(before, batch=batch)
    try:
        yield
    finally:
        _current = before


def get_forward_context() -> ForwardContext:
    """Return the active context.

    Raises:
        RuntimeError: no forward pass is running.
    """
    if _current is None:
        raise RuntimeError("no forward context is active; wrap the model call in forward_context(...)")
    return _current
