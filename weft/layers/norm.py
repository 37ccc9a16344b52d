"""Normalisation layers: RMSNorm, plain or zero-centred, and the gated one of Gated DeltaNet."""

from torch import Tensor, nn

from weft.config.model import ModelConfig
from weft.layers.all_reduce import AllReduce
from weft.layers.context import ModelContext
from weft.layers.weight import RowMap, WeightLayout, WeightModule, empty_parameter, whole
from weft.ops.activation import sigmoid_mul
from weft.ops.collectives import all_reduce_rms_norm
from weft.ops.collectives.peer_buffers import SentRows
from weft.ops.norm import gated_rms_norm, mean_square, rms_norm, scale_by_mean_square
from weft.ops.streams.gated import norm_streams


class RMSNorm(WeightModule):
    """``x / rms(x) * weight`` over the last dimension; ``1 + weight`` if zero-centred (arXiv 1910.07467)."""

    def __init__(self, size: int, eps: float, context: ModelContext, *, zero_centered: bool) -> None:
        super().__init__()
        self._eps, self._zero_centered, self._backend = eps, zero_centered, context.backend
        self.weight = empty_parameter(size, dtype=context.dtype, device=context.device)

    def forward(self, x: Tensor) -> Tensor:
        y = rms_norm(x, self.weight, self._eps, zero_centered=self._zero_centered, backend=self._backend)
        assert isinstance(y, Tensor)
        return y

    def layouts(self) -> tuple[WeightLayout, ...]:
        return ({"weight": whole(self.weight)},)

    def initial_range(self, name: str) -> tuple[float, float]:
        centre = 0.0 if self._zero_centered else 1.0
        return centre - 0.1, centre + 0.1


class StreamsNorm(RMSNorm):
    """RMSNorm of several streams ``[T, N, hidden_size]``, with weights ``[N * hidden_size]``."""

    def __init__(self, count: int, config: ModelConfig, context: ModelContext) -> None:
        super().__init__(
            count * config.hidden_size, config.rms_norm_eps, context, zero_centered=config.zero_centered_norm
        )

    def forward(self, x: Tensor) -> Tensor:
        return norm_streams(x, self.weight, self._eps, zero_centered=self._zero_centered, backend=self._backend)


class ResidualRMSNorm(RMSNorm):
    """The norm of the residual stream: sums the previous block's output over the ranks, adds it and normalises.

    Args:
        partial: True if each rank has a part of the sum that is added; otherwise every rank has the whole sum.
    """

    def __init__(
        self, size: int, eps: float, context: ModelContext, *, zero_centered: bool, partial: bool = True
    ) -> None:
        super().__init__(size, eps, context, zero_centered=zero_centered)
        self._all_reduce = AllReduce.over_ranks(size, context) if partial else None

    def add(self, x: Tensor | SentRows, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return ``(norm(x + residual), x + residual)``. ``x [T, size]`` must not be used afterwards.

        The first layer has no residual, which counts as zero. With a residual, ``x`` may hold partial sums
        (``RowParallelLinear.returns_partial_sums``), or rows sent to other ranks (``AllReduce.peers_to_send``).
        """
        peers = None if self._all_reduce is None else self._all_reduce.peers(x)
        if peers is not None:
            return all_reduce_rms_norm(x, residual, self.weight, self._eps, peers, zero_centered=self._zero_centered)
        assert isinstance(x, Tensor), "rows are sent where they are received"
        if self._all_reduce is not None:
            x = self._all_reduce(x)
        if residual is None:
            return self(x), x
        y = rms_norm(
            x, self.weight, self._eps, zero_centered=self._zero_centered, residual=residual, backend=self._backend
        )
        assert isinstance(y, tuple)
        return y


class OutputRMSNorm(RMSNorm):
    """The norm of a block's output: sums what the block left on each rank, and normalises."""

    def __init__(self, size: int, eps: float, context: ModelContext, *, zero_centered: bool) -> None:
        super().__init__(size, eps, context, zero_centered=zero_centered)
        self._all_reduce = AllReduce.over_ranks(size, context)

    def forward(self, x: Tensor) -> Tensor:
        if self._all_reduce is not None:
            x = self._all_reduce(x)
        return super().forward(x)


class ResidualSum(nn.Module):
    """``x + residual`` where no norm forms it; ``partial`` as for ``ResidualRMSNorm``."""

    def __init__(self, size: int, context: ModelContext, *, partial: bool) -> None:
        super().__init__()
        self._all_reduce = AllReduce.over_ranks(size, context) if partial else None

    def forward(self, x: Tensor, residual: Tensor | None) -> Tensor:
        if self._all_reduce is not None:
            x = self._all_reduce(x)
        return x if residual is None else x + residual


class SpanningRMSNorm(RMSNorm):
    """RMSNorm over channels that are split over the ranks, or replicated equally often: ``[T, C] -> [T, C]`` of this
    rank's channels.

    Args:
        rows: which of all channels these are.
    """

    def __init__(self, rows: RowMap, eps: float, context: ModelContext, *, zero_centered: bool) -> None:
        super().__init__(rows.count, eps, context, zero_centered=zero_centered)
        self._rows, self._num_ranks = rows, context.tp.size
        self._all_reduce = AllReduce.inside_a_layer(1, context)

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        """Return ``norm(x)``, or with ``gate [T, C]`` ``norm(x) * sigmoid(gate)``."""
        if self._all_reduce is None:
            y = super().forward(x)
            return y if gate is None else sigmoid_mul(y, gate, backend=self._backend)
        mean = self._all_reduce(mean_square(x, self._num_ranks, backend=self._backend))
        return scale_by_mean_square(
            x, mean, self.weight, self._eps, zero_centered=self._zero_centered, gate=gate, backend=self._backend
        )

    def layouts(self) -> tuple[WeightLayout, ...]:
        return ({"weight": self._rows.piece(self.weight)},)


class GatedRMSNorm(WeightModule):
    """``weight * x / rms(x) * silu(gate)``, row by row: ``[..., V], [..., V] -> [..., V]`` (arXiv 2412.06464).

    Args:
        activation: of the gate, ``silu`` or ``sigmoid``.
    """

    def __init__(self, size: int, eps: float, context: ModelContext, *, activation: str = "silu") -> None:
        super().__init__()
        self._eps, self._activation, self._backend = eps, activation, context.backend
        self.weight = empty_parameter(size, dtype=context.dtype, device=context.device)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return gated_rms_norm(x, gate, self.weight, self._eps, activation=self._activation, backend=self._backend)

    def layouts(self) -> tuple[WeightLayout, ...]:
        return ({"weight": whole(self.weight)},)

    def initial_range(self, name: str) -> tuple[float, float]:
        return 0.9, 1.1


def residual_norm(config: ModelConfig, context: ModelContext, *, partial: bool = True) -> ResidualRMSNorm:
    """A norm of the residual stream; see ``ResidualRMSNorm``."""
    return ResidualRMSNorm(
        config.hidden_size, config.residual_norm_eps, context, zero_centered=config.zero_centered_norm, partial=partial
    )


def output_norm(config: ModelConfig, context: ModelContext) -> OutputRMSNorm:
    return OutputRMSNorm(config.hidden_size, config.rms_norm_eps, context, zero_centered=config.zero_centered_norm)
