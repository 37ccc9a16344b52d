"""Lightning attention, the recurrent token mixer of MiniMax-Text (arXiv 2501.08313).

Job: one merged input projection ``q | k | v | gate``, SiLU on the first three, linear attention with fixed decays (one
step for decoding rows, chunks for the rest), a norm over all heads, gate, output projection. Owns: the layer's weights,
sharded by head. Does not know: how states are allocated or forked; it finds them by its own name in the forward
context.
"""

import torch
from torch import Tensor

from weft.config.lightning_attention import NORM_EPS, LightningAttentionConfig
from weft.config.model import ModelConfig
from weft.config.sharding import divide
from weft.forward_context import get_forward_context
from weft.graph.split_ops import split_op
from weft.layers.context import ModelContext
from weft.layers.linear import PackedLinear, RowParallelLinear
from weft.layers.norm import SpanningRMSNorm
from weft.layers.recurrent import RecurrentLayer, mix_rows
from weft.layers.weight import RowMap, RowRun, split_rows, stacked
from weft.ops.activation import silu
from weft.ops.linear_attention import chunk_linear_attention, lightning_attention_step
from weft.ops.padding import clear_padding
from weft.parallel.tensor_parallel import TensorParallel


def _qkv_rows(geometry: LightningAttentionConfig, tp: TensorParallel) -> RowMap:
    """Rows of ``q | k | v``, each sorted by head; the checkpoint has each head's q, k, v in a row."""
    heads, width = divide(geometry.num_heads, tp.size, "num_attention_heads"), geometry.head_dim
    runs = tuple(
        RowRun((3 * (tp.rank * heads + head) + part) * width, (part * heads + head) * width, width)
        for head in range(heads)
        for part in range(3)
    )
    return RowMap(3 * geometry.inner_size, runs)


class LightningAttention(RecurrentLayer):
    """Lightning attention; see ``RecurrentLayer``. The rates of decay follow from the number in ``name``."""

    def __init__(
        self, geometry: LightningAttentionConfig, config: ModelConfig, context: ModelContext, name: str
    ) -> None:
        super().__init__(context, name)
        tp = context.tp
        self._num_heads = heads = divide(geometry.num_heads, tp.size, "num_attention_heads")
        self.inner_size = heads * geometry.head_dim
        rates = geometry.slopes(int(name.split(".")[2]))[tp.rank * heads : (tp.rank + 1) * heads]
        self._log_decay = -torch.tensor(rates, dtype=torch.float32, device=context.device)
        rows = split_rows([geometry.inner_size], tp, "num_attention_heads * head_dim")
        self.in_proj = PackedLinear(
            config.hidden_size, stacked(_qkv_rows(geometry, tp), rows), bias=False, context=context
        )
        self.norm = SpanningRMSNorm(rows, NORM_EPS, context, zero_centered=False)
        self.out_proj = RowParallelLinear(
            geometry.inner_size, config.hidden_size, bias=False, context=context, what="num_attention_heads * head_dim"
        )

    @split_op("lightning_attention", width=lambda layer: layer.inner_size)
    def mix(self, projected: Tensor) -> Tensor:
        """Everything between the projections: ``[T, q | k | v | gate] -> [T, inner_size]``."""
        context = get_forward_context()
        batch, state = context.batch, context.caches[self.name]["recurrent"]
        g, backend = self._log_decay.expand(projected.shape[0], -1), self._backend
        heads = silu(projected[:, : 3 * self.inner_size], backend=backend).unflatten(-1, (3, self._num_heads, -1))
        mixed = mix_rows(
            heads.unbind(1),
            [state],
            batch,
            heads.shape[2:],
            lambda q, k, v, *, slots, out: lightning_attention_step(
                q, k, v, self._log_decay, state, slots, backend=backend, out=out
            ),
            lambda q, k, v: chunk_linear_attention(q, k, v, g, None, None, state, batch, backend=backend),
        )
        gated = self.norm(mixed.flatten(1), projected[:, 3 * self.inner_size :])
        return clear_padding(gated, batch.num_tokens)
