"""Mamba with heads, the recurrent token mixer of Zamba (arXiv 2405.16712).

Job: time steps, B and C of each head from its own channels; the rest is Mamba. Owns: these projections, and the order
of the input projection's rows in checkpoints. Does not know: how states are allocated or forked.
"""

import torch
from torch import Tensor

from weft.config.mamba import HeadedMambaConfig
from weft.config.model import ModelConfig
from weft.config.sharding import divide
from weft.layers.context import ModelContext
from weft.layers.mamba import SelectiveScanLayer
from weft.layers.weight import RowMap, RowRun, WeightLayout, empty_parameter, split_rows
from weft.parallel.tensor_parallel import TensorParallel


def alternating_rows(channels: int, tp: TensorParallel) -> RowMap:
    """The rows of this rank's channels where x and z of each channel are neighbours: all x, then all z."""
    count = divide(channels, tp.size, "mamba channels")
    runs = [RowRun(2 * (tp.rank * count + i) + part, part * count + i, 1) for part in range(2) for i in range(count)]
    return RowMap(2 * channels, tuple(runs))


class HeadedMamba(SelectiveScanLayer):
    """Mamba with heads; see ``RecurrentLayer``. Ranks have whole heads, so nothing is summed inside."""

    def __init__(self, geometry: HeadedMambaConfig, config: ModelConfig, context: ModelContext, name: str) -> None:
        mamba, tp = geometry.mamba, context.tp
        super().__init__(mamba, alternating_rows(mamba.num_channels, tp), config, context, name)
        heads, width = divide(geometry.num_heads, tp.size, "n_mamba_heads"), mamba.num_channels // geometry.num_heads
        self._shape, self._sizes = (heads, width), (mamba.dt_rank, mamba.state_size, mamba.state_size)
        self._heads = split_rows([geometry.num_heads], tp, "n_mamba_heads")
        dtype, device = context.dtype, context.device
        self.x_proj_weight = empty_parameter(heads, sum(self._sizes), width, dtype=dtype, device=device)
        self.dt_proj_weight = empty_parameter(heads, width, mamba.dt_rank, dtype=dtype, device=device)
        self.dt_bias = empty_parameter(self.num_channels, dtype=torch.float32, device=device)

    @property
    def time_bias(self) -> Tensor:
        return self.dt_bias

    def time_steps(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """From the convolution's output ``[T, num_channels]``: time steps ``[T, num_channels]`` without their bias,
        and B and C ``[T, heads, state_size]``."""
        by_head = x.unflatten(-1, self._shape).transpose(0, 1)
        dt, b, c = (by_head @ self.x_proj_weight.transpose(1, 2)).split(self._sizes, dim=-1)
        steps = (dt @ self.dt_proj_weight.transpose(1, 2)).transpose(0, 1).flatten(1)
        return steps, b.transpose(0, 1).contiguous(), c.transpose(0, 1).contiguous()

    def layouts(self) -> tuple[WeightLayout, ...]:
        """Every tensor has the heads in its first dimension."""
        parameters = {
            "x_proj_weight": self.x_proj_weight,
            "dt_proj_weight": self.dt_proj_weight,
            "dt_proj_bias": self.dt_bias.unflatten(0, self._shape),
            "A_log": self.A_log.t().unflatten(0, self._shape),
            "D": self.D.unflatten(0, self._shape),
        }
        return ({name: self._heads.piece(parameter) for name, parameter in parameters.items()},)
