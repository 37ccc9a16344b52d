"""Residual streams (hyper-connections): how a block reads several streams and adds its output to each of them.

Job: the connections of one block, in two forms, and the end of the streams. Owns: their weights, whole on every rank.
Does not know: what a block computes.
"""

from abc import abstractmethod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.config.model import ModelConfig
from weft.config.residual_streams import StreamsConfig
from weft.layers.context import ModelContext
from weft.layers.linear import MergedReplicatedLinear
from weft.layers.norm import ResidualRMSNorm, RMSNorm, StreamsNorm
from weft.layers.weight import WeightLayout, WeightModule, empty_parameter, whole
from weft.ops.streams import read_streams, write_streams
from weft.ops.streams.gated import add_to_streams, mean_of_gated, silu_of_mean


class StreamConnection(WeightModule):
    """The connection of one block with the streams ``[T, N, hidden_size]``."""

    @abstractmethod
    def read(self, streams: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the block's input ``[T, hidden_size]`` and the weights for ``write``, one row per token each."""

    @abstractmethod
    def write(self, streams: Tensor, output: Tensor, weights: tuple[Tensor, ...]) -> Tensor:
        """Return the streams after the block whose output is ``[T, hidden_size]``."""

    def layouts(self) -> tuple[WeightLayout, ...]:
        return ({name: whole(parameter) for name, parameter in self.named_parameters()},)


class SinkhornConnection(StreamConnection):
    """Manifold-constrained hyper-connections (arXiv 2512.24880).

    A product of the normalised streams gives three groups of numbers per token. The first weighs streams in the block's
    input, the second weighs the output in every stream, and the third mixes the streams.
    """

    def __init__(self, streams: StreamsConfig, config: ModelConfig, context: ModelContext) -> None:
        super().__init__()
        self._streams, self._norm_eps, self._backend = streams, config.rms_norm_eps, context.backend
        count, width = streams.count, streams.count * config.hidden_size
        size = 2 * count + count * count
        # The sigmoids and the softmax amplify rounding: what they read stays in float32 whatever the model's dtype.
        self.fn = empty_parameter(size, width, dtype=torch.float32, device=context.device)
        self.base = empty_parameter(size, dtype=torch.float32, device=context.device)
        self.scale = empty_parameter(3, dtype=torch.float32, device=context.device)

    def read(self, streams: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        x, weights = read_streams(
            streams,
            F.linear(streams.flatten(1).float(), self.fn),
            self.scale,
            self.base,
            norm_eps=self._norm_eps,
            eps=self._streams.eps,
            iterations=self._streams.iterations,
            backend=self._backend,
        )
        return x, (weights,)

    def write(self, streams: Tensor, output: Tensor, weights: tuple[Tensor, ...]) -> Tensor:
        return write_streams(streams, output, *weights, backend=self._backend)

    def initial_range(self, name: str) -> tuple[float, float]:
        return {"base": (-0.1, 0.1), "scale": (0.9, 1.1)}.get(name) or super().initial_range(name)


class GatedConnection(StreamConnection):
    """Gates of low rank for every channel of every stream (Qwen4-Exp). The block reads the mean of the gated streams.

    Args:
        writes: False at the end of the streams, where there is no block.
    """

    def __init__(
        self, streams: StreamsConfig, config: ModelConfig, context: ModelContext, *, writes: bool = True
    ) -> None:
        super().__init__()
        self._count, self._rank, self._backend = streams.count, streams.rank, context.backend
        width = streams.count * config.hidden_size
        self.hc_norm = StreamsNorm(streams.count, config, context)
        outputs = [streams.rank, streams.count] if writes else [streams.rank]
        self.mix_down = MergedReplicatedLinear(width, outputs, context=context)
        self.mix_up = MergedReplicatedLinear(streams.rank, [width], context=context)

    def read(self, streams: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        normed = self.hc_norm(streams)
        down = self.mix_down(normed.flatten(1))
        gates = self.mix_up(silu_of_mean(down, self._rank, self._count, backend=self._backend))
        x = mean_of_gated(normed, gates, backend=self._backend)
        return x, (down[:, self._rank : self._rank + self._count],)

    def write(self, streams: Tensor, output: Tensor, weights: tuple[Tensor, ...]) -> Tensor:
        return add_to_streams(streams, output, *weights, backend=self._backend)

    def layouts(self) -> tuple[WeightLayout, ...]:
        return ({},)


class MeanOfStreams(ResidualRMSNorm):
    """The final norm, of the mean of the streams."""

    def add(self, x: Any, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """``(norm(mean), streams)`` of the streams ``residual [T, N, hidden_size]``, which hold ``x`` already."""
        assert residual is not None, "the streams begin in the first layer"
        return self(residual.mean(1)), residual


class GatedEnd(GatedConnection):
    """The gated mean of the streams, which the head reads in place of a norm's output."""

    def add(self, x: Any, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the gated mean and the streams. Arguments as for ``MeanOfStreams.add``."""
        assert residual is not None, "the streams begin in the first layer"
        return self.read(residual)[0], residual

    def end(self, streams: Tensor) -> Tensor:
        """``[N, count * hidden_size] -> [N, hidden_size]``."""
        return self.read(streams.unflatten(1, (self._count, -1)))[0]


def stream_connection(config: ModelConfig, context: ModelContext) -> StreamConnection:
    """A connection of the model's form."""
    assert config.streams is not None, "the family has residual streams"
    return (GatedConnection if config.streams.form == "gated" else SinkhornConnection)(config.streams, config, context)


def block_norm(config: ModelConfig, context: ModelContext) -> nn.Module:
    """The norm of a block's input; gated streams are normalised already."""
    if config.streams is not None and config.streams.form == "gated":
        return nn.Identity()
    return RMSNorm(config.hidden_size, config.rms_norm_eps, context, zero_centered=config.zero_centered_norm)


def end_of_streams(config: ModelConfig, context: ModelContext) -> MeanOfStreams | GatedEnd:
    """The model's final norm."""
    assert config.streams is not None, "the family has residual streams"
    if config.streams.form == "gated":
        return GatedEnd(config.streams, config, context, writes=False)
    return MeanOfStreams(
        config.hidden_size, config.rms_norm_eps, context, zero_centered=config.zero_centered_norm, partial=False
    )
