"""Run a model by hand: batches, page tables and caches built in plain Python, without scheduler or runner.

Job: a small, slow and obvious way to drive ``CausalLM`` in tests. ``Sequence`` objects are run in any mix of decodes
and prefill chunks, with padding rows and NaN-filled caches.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from weft.cache.plan import CachePlan
from weft.cache.spec import CacheSpec
from weft.config.checkpoint import read_checkpoint_config
from weft.config.chunks import CHUNK_SIZE
from weft.config.layer_spec import CacheDtypes
from weft.config.model import ModelConfig
from weft.config.quantization import QuantizationConfig
from weft.forward_context import Batch, ChunkTable, ForwardContext, LayerCache, forward_context
from weft.layers.context import ModelContext
from weft.layers.linear import MergedReplicatedLinear
from weft.layers.table import LayerTable
from weft.models.decoder import CausalLM
from weft.models.registry import create_model
from weft.ops.backend import Backend
from weft.ops.fp8 import dequantize_inputs, dequantize_weight, quantize_inputs_reference
from weft.parallel.tensor_parallel import SingleRank, TensorParallel
from weft.runner.memory import allocate_caches
from weft.weights import load_weights


def model_context(
    max_model_len: int = 512,
    tp: TensorParallel | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    backend: Backend = Backend.TORCH,
) -> ModelContext:
    return ModelContext(dtype, torch.device(device), tp or SingleRank(), backend, LayerTable(), max_model_len)


def poison(model: torch.nn.Module) -> None:
    """Fill every parameter with NaN, so that one that the loader forgets shows in the output.

    Rows that only pad a matrix are no checkpoint's business; they stay zero.
    """
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan") if parameter.is_floating_point() else 255)
        for module in model.modules():
            if isinstance(module, MergedReplicatedLinear):
                for parameter in module.parameters():
                    parameter[module.shard.num_filled :].zero_()


def leave_parts(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Have every product whose sum may be left to a norm (``linear_parts``, ``fp8_linear_parts``) come out in two
    parts, as of few rows on a GPU. Returns the list of them, which grows."""
    left: list[Tensor] = []

    def in_two(x: Tensor, weight: Tensor, peers: object = None, *, backend: Backend) -> Tensor:
        pairs = zip(x.float().chunk(2, dim=1), weight.float().chunk(2, dim=1), strict=True)
        left.append(torch.stack([F.linear(part, columns) for part, columns in pairs]))
        return left[-1]

    def fp8_in_two(
        x: Tensor, weight: Tensor, scale: Tensor, static: Tensor | None = None, *, block: int, backend: Backend
    ) -> Tensor:
        inputs = dequantize_inputs(*quantize_inputs_reference(x, static, block=block), block=block)
        return in_two(inputs, dequantize_weight(weight, scale, block=block), backend=backend)

    monkeypatch.setattr("weft.quantization.unquantized.linear_parts", in_two)
    monkeypatch.setattr("weft.quantization.fp8.fp8_linear_parts", fp8_in_two)
    return left


@dataclass(eq=False)
class Sequence:
    """One sequence: tokens so far, number of computed tokens, pages and state slot.

    ``checkpoints`` maps positions to the slots that receive the state there.
    """

    tokens: list[int]
    slot: int
    pages: list[int]
    num_computed: int = 0
    checkpoints: dict[int, int] = field(default_factory=dict)


class Harness:
    """A loaded model with its caches."""

    def __init__(
        self,
        folder: Path,
        *,
        page_size: int = 16,
        num_pages: int = 96,
        num_slots: int = 12,
        tp: TensorParallel | None = None,
        dtype: torch.dtype = torch.float32,
        kv_dtype: torch.dtype | None = None,
        device: str = "cpu",
        backend: Backend = Backend.TORCH,
        quantization: QuantizationConfig | None = None,
        mtp: bool = False,
        expert_parallel: bool = False,
    ) -> None:
        self.config: ModelConfig = read_checkpoint_config(folder)
        if quantization is not None:
            self.config = dataclasses.replace(self.config, quantization=quantization)
        if mtp:
            self.config = self.config.with_mtp()
        context = model_context(self.config.max_position_embeddings, tp, dtype, device, backend)
        self.context = dataclasses.replace(context, expert_parallel=expert_parallel)
        self.model: CausalLM = create_model(self.config, self.context)
        poison(self.model)
        load_weights(self.model, self.config, folder, "auto", 0)
        self.page_size = page_size
        self._free_pages = list(range(1, num_pages))
        self._free_slots = list(range(1, num_slots))
        self.caches = self._make_caches(num_pages, num_slots, dtype, kv_dtype or dtype)

    def _make_caches(
        self, num_pages: int, num_slots: int, dtype: torch.dtype, kv_dtype: torch.dtype
    ) -> dict[str, LayerCache]:
        name, kv = (str(x).removeprefix("torch.") for x in (dtype, kv_dtype))
        self.spec = CacheSpec.from_model(
            self.config,
            page_size=self.page_size,
            dtypes=CacheDtypes(model=name, kv=kv, state="float32"),
            tp_size=self.context.tp.size,
        )
        caches = allocate_caches(self.spec, CachePlan(num_pages, num_slots, 0, 0, 0, {}), self.context.device)
        for cache in caches.values():
            for tensor in cache.values():
                tensor.fill_(float("nan"))
        return caches

    def sequence(self, tokens: list[int], capacity: int | None = None) -> Sequence:
        """A new sequence with pages for ``capacity`` tokens (in scattered order)."""
        count = -(-(capacity or len(tokens) + 48) // self.page_size)
        return Sequence(list(tokens), self.free_slot(), [self._free_pages.pop(-1 - i % 2) for i in range(count)])

    def free_slot(self) -> int:
        return self._free_slots.pop()

    def context_for(self, work: list[tuple[Sequence, int]], pad_tokens: int = 0, pad_seqs: int = 0) -> ForwardContext:
        """The forward context of one step, for driving a single layer."""
        with self.context.device:
            batch, _ = self._batch(work, pad_tokens, pad_seqs)
        return ForwardContext(batch, self.caches, self.context.layers)

    def run(self, work: list[tuple[Sequence, int]], *, pad_tokens: int = 0, pad_seqs: int = 0) -> list[Tensor]:
        """Run the next ``n`` tokens of every ``(sequence, n)`` in one forward; decodes are moved to the front.

        Padding rows are given NaN vectors by the embedding.

        Returns:
            logits ``[n, vocab_size]`` per entry of ``work``, on the CPU.
        """
        ordered = sorted(work, key=lambda item: not self._decodes(*item))
        with self.context.device:
            batch, input_ids = self._batch(ordered, pad_tokens, pad_seqs)
        hook = self.model.model.embed_tokens.register_forward_hook(
            lambda _m, _i, out: _poison_rows(out, batch.num_tokens)
        )
        with hook, torch.no_grad(), forward_context(ForwardContext(batch, self.caches, self.context.layers)):
            hidden = self.model(input_ids)
            logits = self.model.compute_logits(hidden[: batch.num_tokens]).cpu()
        results, start = {}, 0
        for sequence, n in ordered:
            results[id(sequence)] = logits[start : start + n]
            sequence.num_computed += n
            start += n
        return [results[id(sequence)] for sequence, _ in work]

    def decode(self, sequences: list[Sequence], logits: list[Tensor], steps: int, **padding: int) -> None:
        """Append ``steps`` greedy tokens to every sequence, all together; ``logits[i][-1]`` predicts the first one.

        ``padding``: see ``run``.
        """
        for step in range(steps):
            for sequence, rows in zip(sequences, logits, strict=True):
                sequence.tokens.append(int(rows[-1].argmax()))
            if step < steps - 1:
                logits = self.run([(sequence, 1) for sequence in sequences], **padding)

    def release(self, *sequences: Sequence) -> None:
        """Give pages and slots back."""
        for sequence in sequences:
            self._free_pages += sequence.pages
            self._free_slots.append(sequence.slot)

    def _decodes(self, sequence: Sequence, n: int) -> bool:
        return n == 1 and sequence.num_computed > 0 and sequence.num_computed + 1 not in sequence.checkpoints

    def _batch(self, work: list[tuple[Sequence, int]], pad_tokens: int, pad_seqs: int) -> tuple[Batch, Tensor]:
        ids, positions, mapping, cu, seq_lens, slots = [], [], [], [0], [], []
        for sequence, n in work:
            span = range(sequence.num_computed, sequence.num_computed + n)
            ids += [sequence.tokens[p] for p in span]
            positions += span
            mapping += [sequence.pages[p // self.page_size] * self.page_size + p % self.page_size for p in span]
            cu.append(cu[-1] + n)
            seq_lens.append(span.stop)
            slots.append(sequence.slot)
        num_pages = max(len(sequence.pages) for sequence, _ in work)
        table = [sequence.pages + [0] * (num_pages - len(sequence.pages)) for sequence, _ in work]
        num_decodes = sum(self._decodes(*item) for item in work)
        has_chunks = self.spec.has_states and num_decodes < len(work)
        batch = Batch(
            num_tokens=cu[-1],
            num_seqs=len(work),
            num_decodes=num_decodes,
            max_query_len=max(n for _, n in work),
            max_seq_len=max(seq_lens),
            positions=torch.tensor(positions + [0] * pad_tokens),
            slot_mapping=torch.tensor(mapping + [0] * pad_tokens),
            cu_seqlens_q=_int32(cu + [cu[-1]] * pad_seqs),
            seq_lens=_int32(seq_lens + [0] * pad_seqs),
            page_table=_int32(table + [[0] * num_pages] * pad_seqs),
            state_slots=_int32(slots + [0] * pad_seqs),
            chunks=_chunk_table(work, num_decodes, pad_seqs) if has_chunks else None,
        )
        return batch, torch.tensor(ids + [0] * pad_tokens)


def _chunk_table(work: list[tuple[Sequence, int]], num_decodes: int, pad_seqs: int) -> ChunkTable:
    rows: list[tuple[int, int, int, int]] = []
    first, flat = [], 0
    for i, (sequence, n) in enumerate(work):
        first.append(len(rows))
        borders = [p - sequence.num_computed for p in sorted(sequence.checkpoints)]
        start = 0
        while i >= num_decodes and start < n:
            end = min([start + CHUNK_SIZE, n, *(b for b in borders if b > start)])
            slot = sequence.checkpoints.get(sequence.num_computed + end, -1)
            rows.append((i, flat + start, end - start, slot))
            start = end
        flat += n
    first += [len(rows)] * (1 + pad_seqs)
    seq, starts, lengths, slots = zip(*rows, strict=True)
    columns = [_int32(column) for column in (seq, starts, lengths, slots, first)]
    return ChunkTable(*columns, max_seqs=len(work) - num_decodes)


def _poison_rows(vectors: Tensor, num_tokens: int) -> Tensor:
    vectors = vectors.clone()
    vectors[num_tokens:] = float("nan")
    return vectors


def _int32(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)
