"""The example of a new kind of recurrent layer, in one file, in the order of docs/adding-a-model.md.

The kind is a moving average: of channels with a learned decay (state ``fast [C]``), and of the same channels in groups
with a decay that depends on the token (state ``slow [G, C / G]``). The model mixes it with Gated DeltaNet and full
attention; one of its layers has the new kind and attention side by side. ``test_layer_kind.py`` tests it.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests import x_matrix as matrix
from tests.layer_kind import LayerKind
from tests.tiny import make_model
from weft.config.families import FAMILIES
from weft.config.json_object import JsonObject
from weft.config.layer_spec import CacheDtypes, CacheTensor, LayerSpec
from weft.config.model import ModelConfig
from weft.config.sharding import divide
from weft.errors import ConfigError
from weft.forward_context import Batch, get_forward_context
from weft.graph.split_ops import split_op
from weft.layers.context import ModelContext
from weft.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from weft.layers.recurrent import RecurrentLayer
from weft.layers.weight import WeightLayout, WeightTable, empty_parameter, split_rows
from weft.models.weight_names import WEIGHT_TABLES
from weft.ops.device_work import device_work

# -- 1. geometry and spec ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MovingAverageConfig:
    num_channels: int
    num_groups: int

    @property
    def width(self) -> int:
        return self.num_channels // self.num_groups

    def layer_spec(self, hidden_size: int, dtypes: CacheDtypes) -> LayerSpec:
        return LayerSpec(
            states=(
                CacheTensor("fast", (self.num_channels,), dtypes.state, sharded_dim=0),
                CacheTensor("slow", (self.num_groups, self.width), dtypes.state, sharded_dim=0),
            ),
            num_weights=hidden_size * (2 * self.num_channels + self.num_groups),
            flops_per_token=6.0 * self.num_channels,
        )

    def check_shares(self, tp_size: int) -> None:
        divide(self.num_groups, tp_size, "average_groups")


def read_moving_average(text: JsonObject) -> MovingAverageConfig:
    config = MovingAverageConfig(text.integer("average_channels"), text.integer("average_groups"))
    if config.num_channels % config.num_groups:
        raise ConfigError(f"{text.where}: average_groups={config.num_groups} does not divide average_channels")
    return config


# -- 2. layer ---------------------------------------------------------------------------------------------------------


class MovingAverage(RecurrentLayer):
    def __init__(self, geometry: MovingAverageConfig, config: ModelConfig, context: ModelContext, name: str) -> None:
        super().__init__(context, name)
        parts = [geometry.num_channels, geometry.num_groups]
        hidden_size, what = config.hidden_size, "average_channels"
        self._rows = split_rows([geometry.num_channels], context.tp, what)
        self.channels = self._rows.count
        self.in_proj = MergedColumnParallelLinear(hidden_size, parts, bias=False, context=context, what=what)
        self.decay = empty_parameter(self.channels, dtype=torch.float32, device=context.device)
        self.out_proj = RowParallelLinear(parts[0], hidden_size, bias=False, context=context, what=what)

    @split_op("moving_average", width=lambda layer: layer.channels)
    def mix(self, projected: Tensor) -> Tensor:
        context = get_forward_context()
        cache, values = context.caches[self.name], projected[:, : self.channels]
        gates = projected[:, self.channels :].sigmoid()
        return moving_average(values, gates, self.decay.sigmoid(), cache["fast"], cache["slow"], context.batch)

    def layouts(self) -> tuple[WeightLayout, ...]:
        return ({"decay": self._rows.piece(self.decay)},)


# -- 3. operation -----------------------------------------------------------------------------------------------------


def moving_average(values: Tensor, gates: Tensor, decay: Tensor, fast: Tensor, slow: Tensor, batch: Batch) -> Tensor:
    """``values [T, C]``, ``gates [T, G]``, ``decay [C]`` -> ``[T, C]``; states advance in place."""
    out = torch.zeros_like(values, memory_format=torch.contiguous_format)
    if batch.mixed is not None:
        given, states = {"values": values, "gates": gates, "decay": decay}, {"fast": fast, "slow": slow}
        return device_work(moving_average, batch, out, given, states)
    count = batch.num_decodes
    if count:
        slots = batch.state_slots[:count].long()
        u, d = _updates(values[:count], gates[:count], decay)
        new = [d[0] * fast[slots] + u[0], d[1] * slow[slots].flatten(1) + u[1]]
        fast.index_copy_(0, slots, new[0])
        slow.index_copy_(0, slots, new[1].view(count, *slow.shape[1:]))
        out[:count] = (new[0] + new[1]).masked_fill((slots == 0)[:, None], 0.0)
    if batch.chunks:
        _prefill(values, gates, decay, fast, slow, batch, out)
    return out


def _updates(values: Tensor, gates: Tensor, decay: Tensor) -> tuple[Tensor, Tensor]:
    """Return the addends and the factors of the tokens for both states, ``[2, T, C]`` each."""
    wide = gates.repeat_interleave(values.shape[1] // gates.shape[1], dim=1)
    factors = torch.stack([decay.expand_as(values), wide])
    return (1.0 - factors) * values, factors


def _prefill(
    values: Tensor, gates: Tensor, decay: Tensor, fast: Tensor, slow: Tensor, batch: Batch, out: Tensor
) -> None:
    chunks = batch.chunk_table
    first, starts, lengths = chunks.first.tolist(), chunks.start.tolist(), chunks.length.tolist()
    fresh = (batch.seq_lens == batch.cu_seqlens_q.diff()).tolist()
    for seq, (begin, end) in enumerate(pairwise(first)):
        if begin == end:
            continue
        slot = int(batch.state_slots[seq])
        state = torch.stack([fast[slot], slow[slot].flatten()])
        state = torch.zeros_like(state) if fresh[seq] else state
        for i in range(begin, end):
            tokens = slice(starts[i], starts[i] + lengths[i])
            states = _scan(state, *_updates(values[tokens], gates[tokens], decay))
            out[tokens], state = states.sum(0), states[:, -1]
            for target in {int(chunks.checkpoint_slot[i]), slot if i == end - 1 else -1} - {-1}:
                fast[target], slow[target] = state[0], state[1].view(slow.shape[1:])


def _scan(state: Tensor, updates: Tensor, factors: Tensor) -> Tensor:
    """States after each token, ``[2, L, C]``, from the one before the first, ``[2, C]``."""
    log = factors.log().cumsum(1)
    weights = (log[:, :, None] - log[:, None]).exp()  # [2, L, L, C]
    causal = torch.ones(log.shape[1], log.shape[1]).tril().bool()[:, :, None]
    return log.exp() * state[:, None] + torch.where(causal, weights, 0.0).mul(updates[:, None]).sum(2)


# -- 4. family --------------------------------------------------------------------------------------------------------

ARCH = "AveragedForCausalLM"
NEXT = FAMILIES["Qwen3NextForCausalLM"]
AVERAGE = {"average": read_moving_average}
FAMILY = dataclasses.replace(
    NEXT,
    mixers={**NEXT.mixers, "moving_average": AVERAGE, "parallel": {**NEXT.mixers["full_attention"], **AVERAGE}},
)


KINDS = ["moving_average", "linear_attention", "full_attention", "parallel"]
"""A layer of kind ``parallel`` has attention and a moving average side by side; what they give is added."""
CHANNELS, GROUPS = 24, 3


class Oracle(nn.Module):
    """The same layer, token by token, in the place of a layer of transformers' model."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.value_proj = nn.Linear(hidden_size, CHANNELS, bias=False)
        self.gate_proj = nn.Linear(hidden_size, GROUPS, bias=False)
        self.out_proj = nn.Linear(CHANNELS, hidden_size, bias=False)
        self.decay = nn.Parameter(torch.randn(CHANNELS))

    def forward(self, hidden_states: Tensor, **_: Any) -> Tensor:
        (x,), decay = hidden_states, self.decay.sigmoid()
        values, gates = self.value_proj(x), self.gate_proj(x).sigmoid().repeat_interleave(CHANNELS // GROUPS, 1)
        fast, slow, out = torch.zeros(CHANNELS), torch.zeros(CHANNELS), []
        for value, gate in zip(values, gates, strict=True):
            fast = decay * fast + (1 - decay) * value
            slow = gate * slow + (1 - gate) * value
            out.append(fast + slow)
        return self.out_proj(torch.stack(out))[None]


class ParallelOracle(nn.Module):
    """Attention and a moving average of the same input, in the place of a layer's attention."""

    def __init__(self, attention: nn.Module, hidden_size: int) -> None:
        super().__init__()
        self.attention, self.average = attention, Oracle(hidden_size)

    def forward(self, hidden_states: Tensor, **arguments: Any) -> tuple[Tensor, None]:
        attended, _ = self.attention(hidden_states=hidden_states, **arguments)
        return attended + self.average(hidden_states), None


def make_reference(folder: Path) -> matrix.Reference:
    """A tiny Qwen3-Next with moving averages in two layers, saved as a checkpoint of the new architecture."""
    theirs = {"moving_average": "linear_attention", "parallel": "full_attention"}
    types = [theirs.get(kind, kind) for kind in KINDS]
    model = make_model("Qwen3NextForCausalLM", max_position_embeddings=1100, layer_types=types)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        for layer, kind in zip(model.model.layers, KINDS, strict=True):
            if kind == "moving_average":
                layer.linear_attn = Oracle(model.config.hidden_size)
            elif kind == "parallel":
                layer.self_attn = ParallelOracle(layer.self_attn, model.config.hidden_size)
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    save_file({published(name): tensor for name, tensor in tensors.items()}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": [ARCH], "layer_types": KINDS}
    config |= {"average_channels": CHANNELS, "average_groups": GROUPS}
    (folder / "config.json").write_text(json.dumps(config))
    return matrix.Reference(model, folder)


def published(name: str) -> str:
    """The new architecture's name of one of the reference's tensors."""
    name = name.replace("layers.0.linear_attn", "layers.0.average")
    return name.replace("self_attn.attention", "self_attn").replace("self_attn.average", "average")


AVERAGED = LayerKind(
    architecture=ARCH,
    family=FAMILY,
    weight_table=WeightTable(
        # ``in_proj`` alone is Gated DeltaNet's, so the name of the new one stands under its parent.
        WEIGHT_TABLES["Qwen3NextForCausalLM"].packed | {"average.in_proj": ("value_proj", "gate_proj")}
    ),
    geometry=MovingAverageConfig,
    layer=MovingAverage,
    make_reference=make_reference,
    layers=(
        "model.layers.0.average",
        "model.layers.1.linear_attn",
        "model.layers.2.self_attn",
        "model.layers.3.self_attn",
        "model.layers.3.average",
    ),
    module="average",
    slot_bytes=2 * CHANNELS * 4,
)
