"""Attention over a sliding window of one decoder layer.

Job: full attention's projections, norms and rotation; attend over the window in the sequence's state slot. Owns: the
order of stores and reads. Does not know: how states are allocated or forked; it finds its window by its own name in the
forward context.
"""

from typing import Any

from torch import Tensor

from weft.config.model import ModelConfig
from weft.config.sliding_window import SlidingWindowConfig
from weft.forward_context import LogitsRows, get_forward_context
from weft.graph.split_ops import split_op
from weft.layers.attention import Attention
from weft.layers.context import ModelContext
from weft.layers.recurrent import mix_rows
from weft.ops.activation import sigmoid_mul
from weft.ops.window_attention import ScoreTerms, Windows, window_attention, window_attention_decode


class SlidingWindowAttention(Attention):
    """``hidden_states [T, hidden_size] -> [T, hidden_size]``, this rank's part of the sum; padding rows are zero."""

    def __init__(self, geometry: SlidingWindowConfig, config: ModelConfig, context: ModelContext, name: str) -> None:
        super().__init__(geometry.attention, config, context, name)

    def forward_rows(self, hidden_states: Tensor, rows: LogitsRows) -> Tensor:
        """``[T, hidden_size] -> [N, hidden_size]``: attention of all rows, the output of ``rows``."""
        attended = rows.of(self.attend(self._project(hidden_states)))
        return self._output(attended if self.g_proj is None else self._gate_heads(attended, rows.of(hidden_states)))

    @split_op("sliding_window", width=lambda layer: layer.output_width)
    def attend(self, qkv: Tensor) -> Tensor:
        """Everything between the projections: ``[T, q | gate | k | v] -> [T, num_heads * head_dim]``."""
        context = get_forward_context()
        batch, cache = context.batch, context.caches[self.name]
        q, k, v, gate = self._rotated_rows(qkv, cache)
        windows = Windows(cache["k"], cache["v"])
        options: dict[str, Any] = {"scale": self._scale, "backend": self._backend}
        terms = ScoreTerms(self.sinks)
        attended = mix_rows(
            [q, k, v, batch.positions],
            windows,
            batch,
            q.shape[1:],
            lambda q, k, v, positions, *, slots, out: window_attention_decode(
                q, k, v, windows, slots, positions, terms=terms, out=out, **options
            ),
            lambda q, k, v, _: window_attention(q, k, v, *windows, batch, sinks=self.sinks, **options),
        ).flatten(1)
        return attended if gate is None else sigmoid_mul(attended, gate, backend=self._backend)
