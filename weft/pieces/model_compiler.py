"""The model as graphs capture it: as it is, traced, or compiled.

Chooses the sources that the settings name, and prepares the model with each of them once.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from weft.config import EngineConfig
from weft.config.cache_folder import cache_folder
from weft.forward_context import ForwardContext
from weft.graph.graph import GraphPool
from weft.graph.graph_set import CaptureOptions
from weft.graph.split_ops import known_split_ops
from weft.layers.table import import_layers
from weft.ops.traced import opaque_ops
from weft.pieces.capture import PiecewiseModel
from weft.pieces.inductor import PieceCompiler
from weft.pieces.named_splits import NamedSplits
from weft.pieces.sources import CompileCounters, Forward, Traced, run_eagerly
from weft.pieces.split_points import select_split_ops

FOLDER = "pieces"
"""Name of the folder of compiled pieces in the cache folder."""


def make_source(name: str, device: torch.device) -> Traced:
    """Make the source that the setting ``piecewise_cuda_graph_compiler`` names, other than ``capture``.

    Raises:
        ConfigError: it is not available on this machine.
    """
    if name == "eager":
        return Traced(device, run_eagerly, opaque_ops(fusible=True))
    assert name == "inductor", f"there is no source {name}"
    compiler = PieceCompiler(device, cache_folder() / FOLDER)
    return Traced(device, compiler, opaque_ops(fusible=False), compiler.counters)


class ModelCompiler:
    """Prepares one model for capture.

    Args:
        model: ``model(input_ids=ids)``: ``[T] int64 -> [T, hidden_size]``.

    Attributes:
        split_ops: names of the ops that break a pass in pieces; those of functions, methods and modules join them in
            ``for_pieces``.

    Raises:
        ConfigError: a source that is not available here, or a split op that does not exist.
    """

    def __init__(self, config: EngineConfig, model: nn.Module) -> None:
        gloo = config.tensor_parallel_size > 1 and config.device == "cpu"  # it works on the host: no graph can hold it
        if config.splitting_ops is not None:
            import_layers()
        self.split_ops, others = select_split_ops(config.splitting_ops, also=("all_reduce",) if gloo else ())
        self._named = NamedSplits(others, model) if others else None
        self._model, device = model, torch.device(config.device)
        self._pieces_source = config.piecewise_cuda_graph_compiler
        self._decodes_source = "inductor" if config.enable_torch_compile else "capture"
        traced = {self._pieces_source, self._decodes_source} - {"capture"}
        self._sources = {name: make_source(name, device) for name in traced}
        self._prepared: dict[str, Forward] = {}

    @contextmanager
    def for_pieces(self, context: ForwardContext, num_tokens: int) -> Iterator[Forward]:
        """Provide the model from which pieces are captured, in the body.

        Args:
            context: forward context of a captured batch.
            num_tokens: tokens of the largest batch.
        """
        if self._named is None:
            yield self._prepare(self._pieces_source, context, num_tokens)
            return
        # A traced pass is cut at every split op, whether pieces break there or not.
        cut = self.split_ops if self._pieces_source == "capture" else frozenset(known_split_ops())
        self._named.prepare(self._model, context, num_tokens, cut)
        self.split_ops |= self._named.ops
        self._prepared.pop(self._pieces_source, None)  # decodes are not split at names
        with self._named.installed():
            prepared = self._prepare(self._pieces_source, context, num_tokens)
            self._named.check()
            yield prepared

    def for_decodes(self, context: ForwardContext, num_tokens: int) -> Forward:
        """Return the model for full graphs of decodes up to ``torch_compile_max_bs``; see ``for_pieces``."""
        return self._prepare(self._decodes_source, context, num_tokens)

    def capture_pieces(
        self,
        context: Callable[[int], ForwardContext],
        pool: GraphPool,
        sizes: Sequence[int],
        options: CaptureOptions,
        budget_bytes: int,
    ) -> PiecewiseModel:
        """Capture passes of ``sizes`` tokens in pieces. ``context`` maps a token count to its forward context."""
        largest = max(sizes)
        with self.for_pieces(context(largest), largest) as model:
            return PiecewiseModel(model, context, pool, sizes, self.split_ops, options, budget_bytes)

    @property
    def counters(self) -> CompileCounters:
        every = [source.counters for source in self._sources.values()]
        return CompileCounters(
            sum(c.compiled for c in every), sum(c.cache_hits for c in every), sum(c.reused for c in every)
        )

    def _prepare(self, source: str, context: ForwardContext, num_tokens: int) -> Forward:
        if source == "capture":
            return self._model
        if source not in self._prepared:
            self._prepared[source] = self._sources[source].prepare(self._model, context, num_tokens)
        return self._prepared[source]
