"""Capturing what the configured mode uses.

Job: full graphs and pieces of a runner, in one pool and within one budget, and the dispatcher over their sizes. Owns:
the order of capture. Does not know: what the graphs compute, requests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from weft.config import EngineConfig
from weft.graph.dispatcher import CudaGraphMode, Dispatcher
from weft.graph.graph import GraphPool
from weft.graph.profile import ModeTable
from weft.runner.capture_sizes import CaptureSizes
from weft.runner.captured_steps import CapturedSteps, SampledLogits
from weft.runner.forms import ModelForms
from weft.runner.memory import GRAPH_BYTES
from weft.runner.piecewise import PiecewiseModel
from weft.runner.sized_graphs import SizedGraphs

Pieces = Callable[[GraphPool, int], PiecewiseModel]
"""``(pool, budget_bytes)`` to a model in pieces."""


@dataclass(slots=True)
class CapturedGraphs:
    """What was captured; None where the mode has no use for it.

    Attributes:
        decode: of whole decode steps, by batch size.
        forward: of any batch's forward pass, by tokens.
        pieces: any batch's forward pass in pieces, by tokens.
        samples: of drawing tokens after those, by how many.
    """

    decode: SizedGraphs[SampledLogits] | None = None
    forward: SizedGraphs[Tensor] | None = None
    pieces: PiecewiseModel | None = None
    samples: SizedGraphs[SampledLogits] | None = None

    def dispatcher(self, mode: CudaGraphMode, table: ModeTable | None) -> Dispatcher:
        """Chooses among these graphs by the rules of ``mode``, or as measured."""
        return Dispatcher(
            mode,
            decode_sizes=self.decode.sizes if self.decode is not None else (),
            token_sizes=self.pieces.sizes if self.pieces is not None else (),
            full_token_sizes=self.forward.sizes if self.forward is not None else (),
            table=table,
        )


@torch.inference_mode()
def capture_graphs(
    sizes: CaptureSizes,
    steps: CapturedSteps,
    forms: ModelForms,
    make_pieces: Pieces,
    pool: GraphPool,
    config: EngineConfig,
) -> CapturedGraphs:
    """Capture the given sizes. All graphs share ``pool``, because they run one after the other, and ``GRAPH_BYTES``;
    what needs most memory goes first."""
    captured, budget = CapturedGraphs(), GRAPH_BYTES
    capture = partial(SizedGraphs, pool=pool, device=torch.device(config.device), keep_gc=config.enable_cudagraph_gc)
    if sizes.forward:
        steps.pad(steps.mixture_shape(max(sizes.forward)))
        captured.forward = capture("forward graphs", steps.forward, sizes=sizes.forward, budget_bytes=budget)
        budget -= captured.forward.counters.capture_bytes
    if sizes.decode:
        steps.pad(steps.decode_shape(max(sizes.decode)))
        if config.torch_compile_max_bs is not None:
            steps.compile_decodes(forms, config.torch_compile_max_bs)
        captured.decode = capture("decode graphs", steps.decode, sizes=sizes.decode, budget_bytes=budget)
        budget -= captured.decode.counters.capture_bytes
    if sizes.samples:
        steps.pad(steps.mixture_shape(max(sizes.samples)))
        captured.samples = capture("sampling graphs", steps.sample, sizes=sizes.samples, budget_bytes=budget)
        budget -= captured.samples.counters.capture_bytes
    if sizes.pieces:
        captured.pieces = make_pieces(pool, budget)
    return captured
