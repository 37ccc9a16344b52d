"""A runner's captured graphs: captured at start-up, replayed at every step.

Job: capture the graphs of the configured mode, in one pool and within one budget, and replay them. Owns: the graphs,
the order of capture, the dispatcher over their sizes. Does not know: what the graphs compute
(``runner/step_functions.py``), the rules (``graph/dispatcher.py``), requests.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from weft.config import EngineConfig
from weft.config.graph_modes import CudaGraphMode
from weft.graph.batch_descriptor import BatchDescriptor, MeasuredModes
from weft.graph.capture_sizes import CaptureSizes
from weft.graph.dispatcher import Dispatcher, smallest_fitting
from weft.graph.graph import GraphPool
from weft.graph.graph_set import CaptureOptions, FunctionRecorder, GraphSet
from weft.runner.media_inputs import EncoderGraphs
from weft.runner.memory import GRAPH_BYTES, peak_bytes
from weft.runner.sampling.step_sampler import FullStepOutput
from weft.runner.step_functions import StepFunctions

if TYPE_CHECKING:
    from weft.pieces.capture import PiecewiseModel
    from weft.pieces.model_compiler import ModelCompiler

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(slots=True)
class StepGraphs:
    """Graphs by what they compute; None where the mode has no use for them.

    Attributes:
        dispatcher: chooses among them.
        decode: of whole decode steps, by batch size.
        verification: of whole steps in which every sequence verifies drafts, by batch size.
        forward: of any batch's forward pass, by tokens.
        pieces: any batch's forward pass in pieces, by tokens.
        samples: of sampling after those, by how many tokens are sampled.
    """

    dispatcher: Dispatcher = Dispatcher(CudaGraphMode.NONE)
    decode: GraphSet[FullStepOutput] | None = None
    verification: GraphSet[FullStepOutput] | None = None
    forward: GraphSet[Tensor] | None = None
    pieces: PiecewiseModel | None = None
    samples: GraphSet[FullStepOutput] | None = None

    def count_missed(self, shape: BatchDescriptor) -> None:
        """Count a step that fits none of the full graphs of its kind."""
        graphs = self._uniform(shape) if shape.is_uniform else self.forward
        if graphs is not None:
            graphs.counters.missed += 1

    def replay(self, shape: BatchDescriptor, size: int) -> FullStepOutput:
        graphs = self._uniform(shape)
        assert graphs is not None
        return graphs.replay(size, shape.num_seqs)

    def _uniform(self, shape: BatchDescriptor) -> GraphSet[FullStepOutput] | None:
        return self.verification if shape.query_len else self.decode

    def replay_forward(self, shape: BatchDescriptor, size: int) -> Tensor:
        """Replay the graph of a forward pass of ``size`` tokens. Returns the rows of the real tokens."""
        assert self.forward is not None
        return self.forward.replay(size, shape.num_tokens)[: shape.num_tokens]

    def sample_size(self, num_samples: int) -> int | None:
        """Return the size of the smallest sampling graph that takes ``num_samples`` tokens; None if there is none."""
        if self.samples is None or not num_samples:
            return None
        return smallest_fitting(self.samples.sizes, num_samples)

    def replay_sampling(self, shape: BatchDescriptor, size: int) -> FullStepOutput:
        """Replay the graph that samples ``size`` tokens from the kept hidden states."""
        assert self.samples is not None
        return self.samples.replay(size, shape.num_samples)

    @contextmanager
    def dispatching(self, change: Callable[[Dispatcher], Dispatcher]) -> Iterator[None]:
        """Choose by another dispatcher in the body, to measure or to compare. Serving does not use this."""
        before, self.dispatcher = self.dispatcher, change(self.dispatcher)
        try:
            yield
        finally:
            self.dispatcher = before


_FORWARD_SHARE = 0.75
"""Share of the budget that forward graphs may take. Decodes and samples gain more by their graphs, which are small."""


def _sizes_with_room(functions: StepFunctions, sizes: Sequence[int], options: CaptureOptions) -> Sequence[int]:
    """The sizes of forward graphs whose memory fits, measured by running the largest ones."""
    budget = int(_FORWARD_SHARE * GRAPH_BYTES)
    for size in sorted(sizes, reverse=True):
        functions.builder.send_padding(functions.mixed_shape(size))
        needed = peak_bytes(partial(functions.forward, size), options.device)
        if options.least(budget - needed) >= 0:
            return [each for each in sizes if each <= size]
        logger.warning("a forward graph of %d tokens needs %d MiB, it is left out", size, needed >> 20)
    return ()


@torch.inference_mode()
def capture_graphs(
    sizes: CaptureSizes,
    functions: StepFunctions,
    compiler: ModelCompiler | None,
    pool: GraphPool,
    options: CaptureOptions,
    config: EngineConfig,
    table: MeasuredModes | None,
    encoder: EncoderGraphs | None = None,
) -> StepGraphs:
    """Capture the given sizes, and those of the vision tower.

    All graphs share the memory of ``pool``, because no two run at once, and the budget ``GRAPH_BYTES``. The kind that
    needs most memory goes first, and leaves room for the kinds after it.
    """
    graphs, budget = StepGraphs(), GRAPH_BYTES

    def captured(
        what: str,
        function: Callable[[int], T],
        shape_of: Callable[[int], BatchDescriptor],
        sizes: Sequence[int],
        *,
        warm_every_size: bool = False,
    ) -> GraphSet[T] | None:
        nonlocal budget
        if not sizes:
            return None
        functions.builder.send_padding(shape_of(max(sizes)))
        recorder = FunctionRecorder(function, pool)
        found = GraphSet(what, recorder, sizes, options, budget, warm_every_size=warm_every_size)
        budget -= found.counters.capture_bytes
        return found

    forward = _sizes_with_room(functions, sizes.forward, options)
    graphs.forward = captured("forward graphs", functions.forward, functions.mixed_shape, forward)
    compiled = config.torch_compile_max_bs is not None
    if sizes.decode and config.torch_compile_max_bs is not None:
        assert compiler is not None
        functions.compile_decodes(compiler.for_decodes, config.torch_compile_max_bs)
    decode, decode_shape = functions.decode, functions.decode_shape
    graphs.decode = captured("decode graphs", decode, decode_shape, sizes.decode, warm_every_size=compiled)
    verification_shape = functions.verification_shape
    graphs.verification = captured("verification graphs", functions.verify, verification_shape, sizes.verification)
    graphs.samples = captured("sampling graphs", functions.sample, functions.mixed_shape, sizes.samples)
    if encoder is not None:
        budget -= encoder.capture(pool, options, budget)
    if sizes.pieces:
        assert compiler is not None
        functions.builder.send_padding(functions.mixed_shape(max(sizes.pieces)))
        graphs.pieces = compiler.capture_pieces(functions.pieces_context, pool, sizes.pieces, options, budget)
    verified = graphs.verification.sizes if graphs.verification is not None else ()
    graphs.dispatcher = Dispatcher(
        CudaGraphMode(config.cuda_graph_mode),
        decode_sizes=graphs.decode.sizes if graphs.decode is not None else (),
        token_sizes=graphs.pieces.sizes if graphs.pieces is not None else (),
        full_token_sizes=graphs.forward.sizes if graphs.forward is not None else (),
        table=table,
        verification_sizes={size: verification_shape(size).query_len for size in verified},
    )
    return graphs
