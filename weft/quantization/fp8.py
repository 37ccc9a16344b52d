"""Weights in FP8 (e4m3), multiplied with inputs that are quantised at run time.

Job: the parameters of FP8 layers and the operations that use them. Does not know: the arrangement of weights and scales
in checkpoints (``storage.py``), kernels (``weft/ops``).
"""

from functools import partial

import torch
from torch import Tensor, nn

from weft.errors import ConfigError
from weft.layers.context import ModelContext
from weft.layers.linear import LinearBase
from weft.layers.moe import Experts, ExpertsMethod
from weft.layers.weight import MatrixShard, RowMap, WeightLayout, uniform_range
from weft.ops.activation import silu_and_mul
from weft.ops.collectives.peer_buffers import PeerBuffers, SentRows
from weft.ops.fp8 import E4M3, Fp8Matrix
from weft.ops.linear import fp8_linear, fp8_linear_parts, fp8_linear_silu_mul
from weft.ops.moe import Routed, fp8_fused_moe
from weft.quantization.quantized import Parameters, QuantizedLinear, expert_layout, one_by_one, shards
from weft.quantization.storage import OnlineStorage, QuantizedRows, Storage, random_ranges
from weft.quantization.unquantized import fused_layout

_DTYPES = {"weight": E4M3, "weight_scale": torch.float32}


class Fp8Linear(QuantizedLinear):
    """A matrix with ``weight [M, K]`` in e4m3 and ``weight_scale``. ``input_scale [1]`` exists if inputs have a static
    scale."""

    def __init__(self, storage: Storage, context: ModelContext, names: dict[str, str], plain: frozenset[str]) -> None:
        super().__init__(context, names, plain)
        self._storage = storage

    def create(self, layer: LinearBase) -> None:
        layer.register_parameter("input_scale", _input_scale(self._storage, self._context.device))
        super().create(layer)

    def parameters(self, layer: LinearBase, rows: int) -> Parameters:
        columns = layer.shard.columns
        shapes = {"weight": (rows, columns), "weight_scale": self._storage.scale_shape(rows, columns)}
        return {name: (shape, _DTYPES[name]) for name, shape in shapes.items()}

    def part(self, layer: LinearBase, rows: RowMap, name: str) -> WeightLayout:
        weight, scale = layer.get_parameter("weight"), layer.get_parameter("weight_scale")
        return self._storage.layout(layer.shard, rows, weight, scale, _optional(layer, "input_scale"), name)

    def apply(self, layer: LinearBase, x: Tensor, bias: Tensor | None) -> Tensor:
        return fp8_linear(
            x,
            layer.get_parameter("weight"),
            layer.get_parameter("weight_scale"),
            bias,
            _optional(layer, "input_scale"),
            _optional(layer, "plain_weight"),
            block=self._storage.block,
            backend=self._context.backend,
        )

    def apply_partial_sums(self, layer: LinearBase, x: Tensor, peers: PeerBuffers | None = None) -> Tensor:
        weight, scale = layer.get_parameter("weight"), layer.get_parameter("weight_scale")
        static, backend = _optional(layer, "input_scale"), self._context.backend
        if backend.is_invariant:
            return self.apply(layer, x, None)
        return fp8_linear_parts(x, weight, scale, static, block=self._storage.block, backend=backend)

    def apply_silu_mul(self, layer: LinearBase, x: Tensor, bias: Tensor | None) -> Tensor:
        assert not self._plain, "gate and up are both quantised or both not"
        if self._context.backend.is_invariant:
            return silu_and_mul(self.apply(layer, x, bias), backend=self._context.backend)
        return fp8_linear_silu_mul(
            x,
            layer.get_parameter("weight"),
            layer.get_parameter("weight_scale"),
            bias,
            _optional(layer, "input_scale"),
            block=self._storage.block,
            backend=self._context.backend,
        )

    def initial_range(self, layer: LinearBase, name: str) -> tuple[float, float]:
        ranges = random_ranges(layer.shard.columns)
        ranges |= {"weight_scale": ranges["scale"], "plain_weight": uniform_range(layer.shard.columns)}
        return ranges[name]


class Fp8Experts(ExpertsMethod):
    """Experts with ``gate_up [E, 2 * I, H]`` and ``down [E, H, I]`` in e4m3, and scales ``[E, ...]``. If inputs have
    static scales, ``gate_up_input_scale [1]`` and ``down_input_scale [1]`` are the largest of this rank's experts."""

    def __init__(self, storage: Storage, context: ModelContext, name: str) -> None:
        self._storage, self._context, self._name = storage, context, name

    def create(self, layer: Experts) -> None:
        if not layer.gated:
            raise ConfigError(
                f"{self._name}: FP8 experts without a gate (squared ReLU) are not supported; use a checkpoint "
                "in bfloat16 without quantization"
            )
        if layer.gate_up_bias is not None:
            raise ConfigError(
                f"{self._name}: FP8 experts with biases (gpt-oss) are not supported; leave --quantization out and use "
                "a checkpoint in bfloat16"
            )
        device = self._context.device
        for name, shard in shards(layer).items():
            shape = shard.rows, shard.columns
            for part, of_part in (("weight", shape), ("weight_scale", self._storage.scale_shape(*shape))):
                layer.allocate(name, part, of_part, _DTYPES[part], device)
            layer.register_parameter(f"{name}_input_scale", _input_scale(self._storage, device))
        expert_layout(layer, 0, self._name, partial(self._part, layer))  # raises if blocks do not fit

    def layouts(self, layer: Experts) -> tuple[WeightLayout, ...]:
        """Tensors of single experts. Unquantised checkpoints may also fuse tensors over experts."""
        single = one_by_one(layer, self._name, partial(self._part, layer))
        if not isinstance(self._storage, OnlineStorage):
            return (single,)
        return single, fused_layout(layer, QuantizedMatrices(layer, "gate_up"), QuantizedMatrices(layer, "down"))

    def _part(
        self, layer: Experts, matrix: str, place: int, shard: MatrixShard, rows: RowMap, name: str
    ) -> WeightLayout:
        weight, scale = layer.get_parameter(matrix)[place], layer.get_parameter(f"{matrix}_scale")[place]
        return self._storage.layout(shard, rows, weight, scale, _optional(layer, f"{matrix}_input_scale"), name)

    def apply(self, experts: Experts, x: Tensor, routed: Routed, peers: PeerBuffers | None = None) -> Tensor | SentRows:
        found, block = experts.matrices(routed.shared is None), self._storage.block
        gate_up, down = (
            Fp8Matrix(found[name], found[f"{name}_scale"], _optional(experts, f"{name}_input_scale"), block)
            for name in ("gate_up", "down")
        )
        extras, backend = experts.extras, self._context.backend
        if peers is not None:
            from weft.ops.moe.combine import send_experts
            from weft.ops.moe.fp8_experts import pair_outputs

            return send_experts(pair_outputs(x, routed.ids, gate_up, down, extras), routed, peers)
        weights, ids, shared, gate = routed
        return fp8_fused_moe(
            x, gate_up, down, weights, ids, extras=extras, shared=shared, shared_gate=gate, backend=backend
        )

    def initial_range(self, layer: Experts, name: str) -> tuple[float, float]:
        for matrix, shard in shards(layer).items():
            ranges = random_ranges(shard.columns)
            kinds = {matrix: "weight", f"{matrix}_scale": "scale", f"{matrix}_input_scale": "input_scale"}
            if name in kinds:
                return ranges[kinds[name]]
        raise KeyError(name)


class QuantizedMatrices:
    """The rows of all experts' matrices, indexed like a tensor ``[E, rows, columns]``. Values copied into it are
    quantised."""

    def __init__(self, layer: Experts, name: str) -> None:
        self._weight, self._scale = layer.get_parameter(name), layer.get_parameter(f"{name}_scale")

    def __getitem__(self, index: tuple[slice, slice]) -> QuantizedRows:
        return QuantizedRows(self._weight[index], self._scale[index])


def _optional(layer: nn.Module, name: str) -> nn.Parameter | None:
    return layer._parameters.get(name)


def _input_scale(storage: Storage, device: torch.device) -> nn.Parameter | None:
    """An input scale, NaN until a checkpoint's value is copied."""
    if not storage.static:
        return None
    return nn.Parameter(torch.full((1,), float("nan"), device=device), requires_grad=False)
