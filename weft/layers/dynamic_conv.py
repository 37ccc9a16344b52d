"""Short convolutions whose taps follow the token (Inkling 2).

Job: the sum of static and dynamic taps over delayed inputs. Does not know: where dynamic taps come from, how states are
allocated or forked.

One depthwise convolution delays the channels, once for each delay. So the state holds the inputs as often, and no
kernel and no other state is needed.
"""

import torch
from torch import Tensor

from weft.layers.context import ModelContext
from weft.layers.short_conv import convolve_rows
from weft.layers.weight import RowMap, WeightLayout, WeightModule, WeightPiece, empty_parameter


class DynamicConv(WeightModule):
    """``(x + sum over d of (static[d] + dynamic[d]) * x[t - d]) / sqrt(2 * W + 1)`` of keys and of values.

    Args:
        keys: the channels of keys, and of values, that this rank has.
        kernel: W, the number of inputs of one output.

    Attributes:
        taps: static taps ``[2, W, C]`` in float32, by delay.
        delays: taps ``[(W - 1) * 2 * C, W]`` of the convolution that delays, a single one in each row.
    """

    delays: Tensor

    def __init__(self, keys: RowMap, kernel: int, context: ModelContext) -> None:
        super().__init__()
        self._keys, self._backend = keys, context.backend
        self.taps = empty_parameter(2, kernel, keys.count, dtype=torch.float32, device=context.device)
        delays = torch.zeros(kernel - 1, 2 * keys.count, kernel, dtype=context.dtype, device=context.device)
        for i, rows in enumerate(delays):  # the first rows read the token before, the next ones the token before that
            rows[:, kernel - 2 - i] = 1.0
        self.register_buffer("delays", delays.flatten(0, 1), persistent=False)

    def forward(self, x: Tensor, dynamic: Tensor, state: Tensor) -> Tensor:
        """Convolve the rows of this step's batch.

        Args:
            x: ``[T, 2, H, D]``, keys and values by head.
            dynamic: ``[T, 2, H, W]``, the token's own taps of each head, by delay.
            state: ``[num_slots, (W - 1) * 2 * C, W - 1]``, read and updated.

        Returns:
            ``[T, 2, H, D]`` in float32.
        """
        kernel, shape = self.delays.shape[1], x.shape[1:]
        copied = x.flatten(1).repeat(1, kernel - 1)
        delayed = convolve_rows(copied, self.delays, None, state, silu=False, backend=self._backend)
        inputs = torch.cat([x[:, None], delayed.view(-1, kernel - 1, *shape)], dim=1).float()
        taps = self.taps.transpose(0, 1).view(kernel, *shape) + dynamic.float().permute(0, 3, 1, 2)[..., None]
        return ((inputs * taps).sum(1) + inputs[:, 0]) * (2 * kernel + 1) ** -0.5

    def layouts(self) -> tuple[WeightLayout, ...]:
        return ({f"{i}.static_w": self._piece(i) for i in range(2)},)

    def _piece(self, part: int) -> WeightPiece:
        """The piece ``[W, channels]`` of keys or of values."""
        kernel = self.delays.shape[1]
        copies = tuple(
            ((slice(0, kernel), run.source_rows), self.taps[part][:, run.target_rows]) for run in self._keys.runs
        )
        return WeightPiece((kernel, self._keys.total), copies)
