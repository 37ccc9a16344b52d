"""A runner's captured graphs: captured at start-up, chosen and replayed at every step.

Job: capture what the configured mode uses, in one pool and within one budget; choose how a step runs. Owns: the graphs,
the order of capture, the dispatcher over their sizes. Does not know: what the graphs compute
(``runner/step_functions.py``), the rules (``graph/dispatcher.py``), requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from weft.config import EngineConfig
from weft.config.graph_modes import CudaGraphMode, GraphMode, MeasuredModes
from weft.graph.capture_sizes import CaptureSizes, smallest_fitting
from weft.graph.dispatcher import Choice, Dispatcher
from weft.graph.graph import GraphPool
from weft.graph.graph_set import CaptureOptions, FunctionRecorder, GraphSet
from weft.runner.media_inputs import EncoderGraphs
from weft.runner.memory import GRAPH_BYTES
from weft.runner.step_functions import SampledLogits, StepFunctions
from weft.runner.step_inputs import StepShape

if TYPE_CHECKING:
    from weft.pieces.capture import PiecewiseModel
    from weft.pieces.model_compiler import ModelCompiler

T = TypeVar("T")


@dataclass(slots=True)
class StepGraphs:
    """Graphs by what they compute; None where the mode has no use for them.

    Attributes:
        dispatcher: chooses among them.
        decode: of whole decode steps, by batch size.
        verify: of steps in which every sequence verifies drafts, by batch size.
        query_len: from the batch size of such a graph to the tokens of each sequence.
        forward: of any batch's forward pass, by tokens.
        pieces: any batch's forward pass in pieces, by tokens.
        samples: of sampling after those, by how many tokens are sampled.
    """

    dispatcher: Dispatcher = Dispatcher(CudaGraphMode.NONE)
    decode: GraphSet[SampledLogits] | None = None
    verify: GraphSet[SampledLogits] | None = None
    query_len: Callable[[int], int] = lambda size: 1
    forward: GraphSet[Tensor] | None = None
    pieces: PiecewiseModel | None = None
    samples: GraphSet[SampledLogits] | None = None

    def choose(self, shape: StepShape) -> Choice:
        """How a step of these sizes runs."""
        if shape.query_len:
            return self._choose_verification(shape)
        choice = self.dispatcher.choose(shape.descriptor())
        graphs = self.decode if shape.is_decode else self.forward
        if graphs is not None and choice.mode is not GraphMode.FULL:
            graphs.counters.missed += 1
        return choice

    def _choose_verification(self, shape: StepShape) -> Choice:
        size = smallest_fitting(self.verify.sizes, shape.num_seqs) if self.verify is not None else None
        if size is None or self.query_len(size) != shape.query_len:
            return Choice(GraphMode.NONE, shape.num_tokens)
        return Choice(GraphMode.FULL, size)

    def sample_size(self, num_samples: int) -> int | None:
        """The size of the smallest sampling graph that takes ``num_samples`` tokens; None if there is none."""
        return smallest_fitting(self.samples.sizes, num_samples) if self.samples is not None else None

    @contextmanager
    def dispatching(self, change: Callable[[Dispatcher], Dispatcher]) -> Iterator[None]:
        """Choose by another dispatcher in the body: to measure and to compare; serving has no use for it."""
        before, self.dispatcher = self.dispatcher, change(self.dispatcher)
        try:
            yield
        finally:
            self.dispatcher = before


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
    """Capture the given sizes, and those of the vision tower. All graphs share ``pool``, because they run one after the
    other, and ``GRAPH_BYTES``; what needs most memory goes first."""
    graphs, budget = StepGraphs(), GRAPH_BYTES

    def captured(
        what: str,
        function: Callable[[int], T],
        shape_of: Callable[[int], StepShape],
        sizes: Sequence[int],
        *,
        warm_every_size: bool = False,
    ) -> GraphSet[T] | None:
        nonlocal budget
        if not sizes:
            return None
        functions.pad(shape_of(max(sizes)))
        recorder = FunctionRecorder(function, pool)
        found = GraphSet(what, recorder, sizes, options, budget, warm_every_size=warm_every_size)
        budget -= found.counters.capture_bytes
        return found

    graphs.forward = captured("forward graphs", functions.forward, functions.mixture_shape, sizes.forward)
    compiled = config.torch_compile_max_bs is not None
    if sizes.decode and config.torch_compile_max_bs is not None:
        assert compiler is not None
        functions.compile_decodes(compiler.for_decodes, config.torch_compile_max_bs)
    decode, decode_shape = functions.decode, functions.decode_shape
    graphs.decode = captured("decode graphs", decode, decode_shape, sizes.decode, warm_every_size=compiled)
    graphs.verify = captured("verification graphs", functions.verify, functions.verification_shape, sizes.verify)
    graphs.query_len = functions.query_len
    graphs.samples = captured("sampling graphs", functions.sample, functions.mixture_shape, sizes.samples)
    if encoder is not None:
        budget -= encoder.capture(pool, options, budget)
    if sizes.pieces:
        assert compiler is not None
        functions.pad(functions.mixture_shape(max(sizes.pieces)))
        graphs.pieces = compiler.capture_pieces(functions.pieces_context, pool, sizes.pieces, options, budget)
    graphs.dispatcher = Dispatcher(
        CudaGraphMode(config.cuda_graph_mode),
        decode_sizes=graphs.decode.sizes if graphs.decode is not None else (),
        token_sizes=graphs.pieces.sizes if graphs.pieces is not None else (),
        full_token_sizes=graphs.forward.sizes if graphs.forward is not None else (),
        table=table,
    )
    return graphs
