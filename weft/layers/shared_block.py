"""Transformer blocks whose weights several layers read (Zamba, arXiv 2405.16712 and 2411.15242).

Job: attention over hidden states and embeddings, an MLP, and the parts that each layer adds: adapters and an output
projection. Owns: the rule by which a layer finds the layer whose weights it reads. Does not know: caches; every
layer registers under its own name, and so has its own keys and values.

Layers that share weights hold the same module objects. A walk through a model's modules meets a shared module once, in
the first layer that has it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from weft.config.model import ModelConfig, layer_name
from weft.config.sharding import divide
from weft.config.shared_block import SharedBlockConfig
from weft.layers.attention import Attention
from weft.layers.context import ModelContext
from weft.layers.linear import MergedColumnParallelLinear, PackedLinear, RowParallelLinear
from weft.layers.mlp import MLP
from weft.layers.norm import OutputRMSNorm, ResidualSum, RMSNorm
from weft.layers.weight import RowMap, stacked, whole_rows


class QkvAdapter(nn.Module):
    """Additions of low rank to queries, keys and values (LoRA, arXiv 2106.09685): ``[T, K] -> [T, q | k | v]``.

    Args:
        rows: which rows of each projection this rank has.
    """

    def __init__(self, in_features: int, rank: int, rows: Sequence[RowMap], context: ModelContext) -> None:
        super().__init__()
        self._rank = rank
        self.qkv_down = PackedLinear(in_features, stacked(*[whole_rows(rank)] * 3), bias=False, context=context)
        self.q_up, self.k_up, self.v_up = (PackedLinear(rank, {"": part}, bias=False, context=context) for part in rows)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv_down(x).split(self._rank, dim=-1)
        return torch.cat([self.q_up(q), self.k_up(k), self.v_up(v)], dim=-1)


class GateUpAdapter(nn.Module):
    """An addition of low rank to both input projections of an MLP: ``[T, hidden_size] -> [T, gate | up]``."""

    def __init__(self, hidden_size: int, rank: int, intermediate_size: int, context: ModelContext) -> None:
        super().__init__()
        self.gate_up_down = PackedLinear(hidden_size, {"": whole_rows(rank)}, bias=False, context=context)
        self.gate_up_up = MergedColumnParallelLinear(
            rank, [intermediate_size] * 2, bias=False, context=context, what="intermediate_size"
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.gate_up_up(self.gate_up_down(x))


class SharedBlock(Attention):
    """One layer's use of a block: ``hidden_states, embeddings [T, hidden_size] -> [T, hidden_size]``, this rank's part
    of the sum (rows of padding tokens are arbitrary).

    Args:
        name: key of the layer's KV cache and of its entry in the layer table.

    Attributes:
        qkv_adapters, mlp_adapters: of all layers with this block, by layer.
    """

    _SHARED = ("qkv_proj", "o_proj", "input_layernorm", "pre_ff_layernorm", "mlp", "qkv_adapters", "mlp_adapters")

    input_layernorm: RMSNorm
    pre_ff_layernorm: OutputRMSNorm
    mlp: MLP
    qkv_adapters: nn.ModuleDict
    mlp_adapters: nn.ModuleDict

    def __init__(self, geometry: SharedBlockConfig, config: ModelConfig, context: ModelContext, name: str) -> None:
        super().__init__(geometry.attention, config, context, name)
        *_, layer, module = name.split(".")
        owner = context.layers[f"{layer_name(geometry.owner_of(int(layer)))}.{module}"]
        if owner is self:
            self._create_shared(geometry, config, context)
        for part in self._SHARED:
            setattr(self, part, getattr(owner, part))
        self._place = str(geometry.layers.index(int(layer)))
        self._add_adapters(geometry, config.hidden_size, context)
        size, tp = config.hidden_size, context.tp
        self._sum = ResidualSum(size, context, partial=True)
        columns = divide(size, tp.size, "hidden_size")
        self._columns = slice(tp.rank * columns, (tp.rank + 1) * columns)
        self.linear = RowParallelLinear(size, size, bias=False, context=context, what="hidden_size")

    def _create_shared(self, geometry: SharedBlockConfig, config: ModelConfig, context: ModelContext) -> None:
        """Create what layers share, except for the projections of attention."""
        size, eps, width = config.hidden_size, config.rms_norm_eps, geometry.intermediate_size
        self.input_layernorm = RMSNorm(2 * size, eps, context, zero_centered=False)
        self.pre_ff_layernorm = OutputRMSNorm(size, eps, context, zero_centered=False)
        self.mlp = MLP(size, width, context, bias=config.mlp_bias, activation=config.activation)
        self.qkv_adapters, self.mlp_adapters = nn.ModuleDict(), nn.ModuleDict()

    def _add_adapters(self, geometry: SharedBlockConfig, hidden_size: int, context: ModelContext) -> None:
        """Add this layer's adapters to those of the block, which checkpoints store together."""
        if geometry.attention_rank:
            rows = [part.moved(-part.runs[0].target) for part in self.qkv_proj.shard.parts.values()]
            self.qkv_adapters[self._place] = QkvAdapter(2 * hidden_size, geometry.attention_rank, rows, context)
        if geometry.mlp_rank:
            width = geometry.intermediate_size
            self.mlp_adapters[self._place] = GateUpAdapter(hidden_size, geometry.mlp_rank, width, context)

    def forward(self, hidden_states: Tensor, embeddings: Tensor) -> Tensor:  # type: ignore[override]  # reads both
        x = self.input_layernorm(torch.cat([hidden_states, embeddings], dim=-1))
        x = self.pre_ff_layernorm(super().forward(x))
        projected = self._with_adapter(self.mlp.gate_up_proj(x), x, self.mlp_adapters)
        whole = self._sum(self.mlp.geglu(projected), None)
        return self.linear(whole[:, self._columns].contiguous())

    def _project(self, hidden_states: Tensor) -> Tensor:
        return self._with_adapter(super()._project(hidden_states), hidden_states, self.qkv_adapters)

    def _with_adapter(self, projected: Tensor, x: Tensor, adapters: nn.ModuleDict) -> Tensor:
        return projected + adapters[self._place](x) if self._place in adapters else projected
