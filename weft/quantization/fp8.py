"""Weights in FP8 (e4m3), multiplied with inputs that are quantised at run time.

Job: the parameters of FP8 layers and the operations that use them. Does not know: the arrangement of weights and scales
in checkpoints (``storage.py``), kernels (``weft/ops``).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from weft.errors import ConfigError
from weft.layers.context import ModelContext
from weft.layers.linear import LinearBase, LinearMethod
from weft.layers.moe import Experts, ExpertsMethod, Routed
from weft.layers.weight import MatrixShard, WeightLayout, WeightPiece, empty_parameter, uniform_range
from weft.ops.activation import silu_and_mul
from weft.ops.collectives.peer_buffers import PeerBuffers, SentRows
from weft.ops.fp8 import E4M3, Fp8Matrix
from weft.ops.linear import fp8_linear, fp8_linear_parts, fp8_linear_silu_mul
from weft.ops.moe import fp8_fused_moe, send_fp8_fused_moe
from weft.quantization.storage import OnlineStorage, QuantizedRows, Storage, random_ranges
from weft.quantization.unquantized import fused_layout

_DTYPES = {"weight": E4M3, "weight_scale": torch.float32}


class Fp8Linear(LinearMethod):
    """A matrix with ``weight [M, K]`` in e4m3 and ``weight_scale``. ``input_scale [1]`` exists if inputs have a static
    scale. ``plain_weight [N - M, K]`` in the model's dtype holds the unquantised parts, which come last.

    Args:
        names: prefix of each part's tensors -> its name in the checkpoint, for errors.
        plain: prefixes of the unquantised parts.
    """

    def __init__(self, storage: Storage, context: ModelContext, names: dict[str, str], plain: frozenset[str]) -> None:
        self._storage, self._context, self._names, self._plain = storage, context, names, plain

    def create(self, layer: LinearBase) -> None:
        shard, device = layer.shard, self._context.device
        plain = [run.target for part in self._plain for run in shard.parts[part].runs]
        rows, columns = min(plain, default=shard.rows), shard.columns
        shapes = {"weight": (rows, columns), "weight_scale": self._storage.scale_shape(rows, columns)}
        for name, shape in shapes.items():
            place = layer.places.get(name)
            parameter = empty_parameter(*shape, dtype=_DTYPES[name], device=device, place=place)
            layer.register_parameter(name, parameter)
        layer.register_parameter("input_scale", _input_scale(self._storage, device))
        if plain:
            dtype = self._context.dtype
            layer.plain_weight = empty_parameter(shard.rows - rows, columns, dtype=dtype, device=device)
        self.layouts(layer)  # raises if blocks do not fit

    def layouts(self, layer: LinearBase) -> tuple[WeightLayout, ...]:
        shard, layout = layer.shard, WeightLayout()
        weight, scale = layer.get_parameter("weight"), layer.get_parameter("weight_scale")
        for part, rows in shard.parts.items():
            if part in self._plain:
                plain_weight = layer.get_parameter("plain_weight")
                layout[f"{part}weight"] = shard.piece(rows.moved(-weight.shape[0]), plain_weight)
                continue
            found = self._storage.layout(shard, rows, weight, scale, _optional(layer, "input_scale"), self._names[part])
            layout |= {f"{part}{tensor}": piece for tensor, piece in found.items()}
        return (layout,)

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
        if layer.clamped is not None or layer.gate_up_bias is not None:
            raise ConfigError(
                f"{self._name}: FP8 experts with biases or a clamped activation (gpt-oss) are not supported; leave "
                "--quantization out and use a checkpoint in bfloat16"
            )
        device = self._context.device
        for name, shard in _matrices(layer):
            shape = shard.rows, shard.columns
            for part, of_part in (("weight", shape), ("weight_scale", self._storage.scale_shape(*shape))):
                layer.allocate(name, part, of_part, _DTYPES[part], device)
            layer.register_parameter(f"{name}_input_scale", _input_scale(self._storage, device))
        self._expert(layer, 0)  # raises if blocks do not fit

    def layouts(self, layer: Experts) -> tuple[WeightLayout, ...]:
        """Tensors of single experts (``7.gate_proj.weight``). Unquantised checkpoints may also fuse tensors over
        experts."""
        one_by_one, first = WeightLayout(), layer.local_experts.start
        elsewhere = {name: WeightPiece(piece.shape, (), piece.stored) for name, piece in self._expert(layer, 0).items()}
        for expert in range(layer.num_experts):  # the checkpoint also has the experts of other ranks
            found = self._expert(layer, expert - first) if expert in layer.local_experts else elsewhere
            one_by_one |= {f"{expert}.{tensor}": piece for tensor, piece in found.items()}
        return (one_by_one, self._fused(layer)) if isinstance(self._storage, OnlineStorage) else (one_by_one,)

    def _expert(self, layer: Experts, place: int) -> WeightLayout:
        """Tensors of one of this rank's experts, by their names after the expert's number."""
        layout = WeightLayout()
        for name, shard in _matrices(layer):
            weight, scale = layer.get_parameter(name)[place], layer.get_parameter(f"{name}_scale")[place]
            input_scale = _optional(layer, f"{name}_input_scale")
            for part, rows in shard.parts.items():
                where = f"{self._name}.{layer.local_experts[place]}.{part}".removesuffix(".")
                found = self._storage.layout(shard, rows, weight, scale, input_scale, where)
                layout |= {f"{part}{tensor}": piece for tensor, piece in found.items()}
        return layout

    def _fused(self, layer: Experts) -> WeightLayout:
        return fused_layout(layer, QuantizedMatrices(layer, "gate_up"), QuantizedMatrices(layer, "down"))

    def apply(self, experts: Experts, x: Tensor, routed: Routed, peers: PeerBuffers | None = None) -> Tensor | SentRows:
        found, block = experts.matrices(routed.shared is None), self._storage.block
        gate_up, down = (
            Fp8Matrix(found[name], found[f"{name}_scale"], _optional(experts, f"{name}_input_scale"), block)
            for name in ("gate_up", "down")
        )
        if peers is not None:
            return send_fp8_fused_moe(x, gate_up, down, *routed, peers=peers)
        weights, ids, shared, gate = routed
        backend = self._context.backend
        return fp8_fused_moe(x, gate_up, down, weights, ids, shared=shared, shared_gate=gate, backend=backend)

    def initial_range(self, layer: Experts, name: str) -> tuple[float, float]:
        for matrix, shard in _matrices(layer):
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


def _matrices(layer: Experts) -> tuple[tuple[str, MatrixShard], ...]:
    return ("gate_up", layer.gate_up_shard), ("down", layer.down_shard)


def _optional(layer: nn.Module, name: str) -> nn.Parameter | None:
    """A parameter that not every layer has."""
    return layer._parameters.get(name)


def _input_scale(storage: Storage, device: torch.device) -> nn.Parameter | None:
    """An input scale, NaN until a checkpoint's value is copied."""
    if not storage.static:
        return None
    return nn.Parameter(torch.full((1,), float("nan"), device=device), requires_grad=False)
