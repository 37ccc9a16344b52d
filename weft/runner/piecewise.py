"""The model's forward pass in captured pieces: for prefill and mixed batches, one pass per token count.

Job: capture the pass for a list of token counts, and run a batch in one of them. Owns: the static token ids, the
captured passes and their counters. Does not know: how pieces are made, which batch runs in pieces, sampling.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from tqdm import tqdm

from weft.config import EngineConfig
from weft.forward_context import Batch, BatchDescriptor, ForwardContext, GraphMode, forward_context
from weft.graph.capturing import NUM_WARMUPS, free_text, frozen_gc, reserved_bytes
from weft.graph.graph import GraphPool
from weft.graph.pieces import PieceCapture, PieceSequence
from weft.graph.wrapper import GraphWrapper
from weft.runner.batch_builder import BatchBuilder, StepShape
from weft.runner.forms import ModelForms

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class PiecewiseCounters:
    """Totals since the start.

    Attributes:
        captures: token counts captured.
        pieces: graphs of one pass.
        replays: steps that ran in pieces.
        tokens, padding_tokens: rows replayed, and how many of them were padding.
        capture_seconds: time that capturing took, warm-ups included.
        compiled, cache_hits: distinct pieces that this start compiled, and that it found on disk; both zero unless the
            pieces come from a compiler.
        capture_bytes: device memory that the graphs and the static buffers hold (0 on the CPU).
    """

    captures: int = 0
    pieces: int = 0
    replays: int = 0
    tokens: int = 0
    padding_tokens: int = 0
    capture_seconds: float = 0.0
    capture_bytes: int = 0
    compiled: int = 0
    cache_hits: int = 0


class PiecewiseModel:
    """A model that runs in pieces where ``run`` asks for it, and is itself in every other mode.

    Args:
        model: ``model(input_ids=ids)``: ``[T] int64 -> [T, hidden_size]``, under a forward context.
        context: from a token count to the forward context of a capture; what the pieces read of its batch must be
            static device memory.
        pool: where graphs come from.
        sizes: token counts to capture.
        split_ops: names of the ops that break the pass.
        budget_bytes: device memory that this may hold; the largest sizes are captured first, and what is left when it
            is used up is left out with a message.
        keep_gc: leave the garbage collector on during capture.
        debug: check at every replay that nothing that the pieces read has moved; ``watched`` names what that is, beside
            the token ids.
    """

    def __init__(
        self,
        model: Callable[..., Tensor],
        context: Callable[[int], ForwardContext],
        pool: GraphPool,
        sizes: Sequence[int],
        split_ops: frozenset[str],
        *,
        device: torch.device,
        budget_bytes: int,
        keep_gc: bool = False,
        debug: bool = False,
        watched: Mapping[str, Tensor] | None = None,
        show_progress: bool = True,
    ) -> None:
        self.counters = PiecewiseCounters()
        self._device, self._model = device, model
        self._ids = torch.zeros(max(sizes), dtype=torch.int64, device=device)
        self._source = PieceCapture(pool, split_ops, max(sizes))
        self._wrapper = GraphWrapper(
            model, GraphMode.PIECEWISE, self._source.capture, debug=debug, watched=watched if debug else None
        )
        started = time.perf_counter()
        with frozen_gc(enabled=not keep_gc):
            self._capture_all(context, sorted(sizes, reverse=True), budget_bytes, show_progress)
        self.sizes = sorted(descriptor.num_tokens for descriptor in self._wrapper.descriptors)
        self.counters.captures = len(self.sizes)
        self.counters.pieces = self._source.num_breaks + 1
        self.counters.capture_seconds = time.perf_counter() - started

    def _capture_all(
        self,
        context: Callable[[int], ForwardContext],
        sizes: list[int],
        budget: int,
        show_progress: bool,
    ) -> None:
        with tqdm(sizes, desc="Capturing pieces", disable=not show_progress, dynamic_ncols=True) as bar:
            for size in bar:
                used = self.counters.capture_bytes
                if used > budget:
                    left = [s for s in sizes if s <= size]
                    logger.warning(
                        "pieces hold %d MiB, the budget is used up: no pieces for token counts %s", used >> 20, left
                    )
                    return
                self._capture(context(size), self._ids[:size])
                bar.set_postfix_str(free_text(self._device), refresh=False)

    def _capture(self, context: ForwardContext, ids: Tensor) -> None:
        with forward_context(replace(context, breaks=self._source)):
            for _ in range(NUM_WARMUPS):
                self._source.warm_up(lambda: self._model(input_ids=ids))
            before = reserved_bytes(self._device)
            self._wrapper.capture(BatchDescriptor(ids.shape[0]), input_ids=ids)
            self.counters.capture_bytes += reserved_bytes(self._device) - before

    @property
    def form(self) -> Callable[..., Tensor]:
        """What was captured: the model, or what was made of it."""
        return self._model

    def sequence(self, size: int) -> PieceSequence:
        """The pass captured for ``size`` tokens, to look at."""
        graph = self._wrapper.graph(BatchDescriptor(size))
        assert isinstance(graph, PieceSequence)
        return graph

    def __call__(self, *, input_ids: Tensor) -> Tensor:
        """The model itself, as the active forward context runs it."""
        return self._wrapper(input_ids=input_ids)

    def run(self, context: ForwardContext, input_ids: Tensor, size: int) -> Tensor:
        """Run a batch in the pieces captured for ``size`` tokens.

        Args:
            context: of the batch, with its real sizes; split ops run under it.
            input_ids: ``[T] int64``, T at most ``size``.

        Returns:
            ``[T, hidden_size]``, valid until the next call.
        """
        count = input_ids.shape[0]
        ids = self._ids[:size]
        ids[:count].copy_(input_ids)
        ids[count:].zero_()
        with forward_context(replace(context, mode=GraphMode.PIECEWISE, descriptor=BatchDescriptor(size))):
            hidden_states = self._wrapper(input_ids=ids)
        self.counters.replays += 1
        self.counters.tokens += size
        self.counters.padding_tokens += size - count
        return hidden_states[:count]


def capture_pieces(
    forms: ModelForms,
    watched: Mapping[str, Tensor],
    builder: BatchBuilder,
    shape: Callable[[int], StepShape],
    context: Callable[[Batch], ForwardContext],
    pool: GraphPool,
    config: EngineConfig,
    sizes: Sequence[int],
    *,
    budget_bytes: int,
) -> PiecewiseModel:
    """The model in pieces, as the config says.

    Args:
        forms: of the model.
        watched: see ``PiecewiseModel``.
        builder: its static buffers are what the pieces read of a batch.
        shape: from a token count to the padded sizes of a batch of any sequences.
        context: from a batch to its forward context.
        sizes, budget_bytes: see ``PiecewiseModel``.
    """
    builder.send_padding(shape(max(sizes)))

    def context_of(size: int) -> ForwardContext:
        return context(builder.materialise(shape(size)).batch)

    pieces = PiecewiseModel(
        forms.for_pieces(context_of(max(sizes)), max(sizes)),
        context_of,
        pool,
        sizes,
        forms.split_ops,
        device=torch.device(config.device),
        budget_bytes=budget_bytes,
        keep_gc=config.enable_cudagraph_gc,
        debug=config.enable_torch_compile_debug_mode,
        watched=watched,
    )
    pieces.counters.compiled, pieces.counters.cache_hits = forms.counters.compiled, forms.counters.cache_hits
    return pieces
