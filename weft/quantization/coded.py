"""Coded weights of linear layers and experts: integers of 4 or 8 bits, FP4 or MXFP8, with inputs that are not rounded.

Job: the parameters of coded layers and the operations that use them. Does not know: the tensors of checkpoints
(``arrangements.py``, ``gpt_oss.py``), kernels (``weft/ops``).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from weft.config.quantization import Scheme
from weft.layers.context import ModelContext
from weft.layers.linear import LinearBase
from weft.layers.moe import Experts, ExpertsMethod
from weft.layers.weight import RowMap, WeightLayout, uniform_range
from weft.ops.codes import CodedMatrix, Packing, fitting_group
from weft.ops.collectives.peer_buffers import PeerBuffers, SentRows
from weft.ops.fp8 import E4M3
from weft.ops.linear import coded_linear, coded_linear_parts, coded_linear_silu_mul
from weft.ops.moe import Routed
from weft.ops.moe.coded import coded_fused_moe
from weft.quantization.arrangements import RoundedRows, arrangement
from weft.quantization.gpt_oss import gpt_oss_layout
from weft.quantization.quantized import Parameters, QuantizedLinear, one_by_one, shards
from weft.quantization.unquantized import fused_layout, interleaved_layout

_PARTS = ("", "_scale", "_zero", "_row_scale")
"""Ends of the names of the parameters of a coded matrix, in the order of ``CodedMatrix``."""

_SPREAD = {"int4": 4.61, "int8": 73.9, "fp4": 2.93, "mxfp8": 129.3}
"""Root mean square of the numbers of random codes."""


class _Form:
    """Shapes, dtypes and random values of the parameters of coded matrices of one scheme."""

    def __init__(self, scheme: Scheme, dtype: torch.dtype) -> None:
        self._scheme = scheme
        self._is_e4m3 = scheme.form == "mxfp8"
        self.bits, self.is_float = (8 if scheme.form in ("int8", "mxfp8") else 4), scheme.form in ("fp4", "mxfp8")
        self._scale_dtype = dtype if scheme.scales == "float" else torch.uint8

    def group(self, columns: int, name: str) -> int:
        """Weights of a row that share a scale on this rank; 0: all of them."""
        return fitting_group(columns, name) if self._scheme.source == "online" else self._scheme.group

    def parameters(self, rows: int, columns: int, group: int) -> Parameters:
        """Shape and dtype by the end of the parameter's name."""
        groups = -(-columns // group) if group else 1
        *shape, num_words = Packing.of(self.bits, group).words_shape(rows, columns)
        shapes: Parameters = {
            "": ((*shape, 4 * num_words), E4M3) if self._is_e4m3 else ((*shape, num_words), torch.int32),
            "_scale": ((groups, rows), self._scale_dtype),
        }
        if not self._scheme.symmetric:
            shapes["_zero"] = (groups, rows), torch.uint8
        if self._scheme.scales == "e4m3":
            shapes["_row_scale"] = (rows,), torch.float32
        return shapes

    def matrix(self, find: Callable[[str], Tensor | None], group: int, columns: int) -> CodedMatrix:
        """The matrix of the parameters that ``find`` returns by the ends of their names."""
        words, scale, zero, row_scale = (find(part) for part in _PARTS)
        assert words is not None and scale is not None
        words = words.view(torch.int32) if self._is_e4m3 else words
        return CodedMatrix(words, scale, zero, row_scale, self.bits, self.is_float, group, columns)

    def random_range(self, part: str, fan_in: int) -> tuple[float, float]:
        """Bounds of random values, for weights with a standard deviation of ``fan_in ** -0.5``.

        Integer codes have a mean of -1/2, so scales have both signs. With a mean, all tokens would become alike and
        choose the same experts.
        """
        scale = fan_in**-0.5 / _SPREAD[self._scheme.form]
        exponent = round(torch.tensor(scale).log2().item()) + 127
        scales = {
            "float": (-(3**0.5) * scale, 3**0.5 * scale),
            "e4m3": (0x30, 0x40),
            "e8m0": (exponent - 1, exponent + 2),
        }
        middle = 1 << self.bits - 1
        return {
            "": (-224.0, 224.0) if self._is_e4m3 else (-(2.0**31), 2.0**31 - 1),
            "_scale": scales[self._scheme.scales],
            "_zero": (middle - 2, middle + 3),
            "_row_scale": (0.8 * scale, 1.2 * scale),
        }[part]


class CodedLinear(QuantizedLinear):
    """A matrix with ``weight`` (words), ``weight_scale`` and, in some formats, ``weight_zero`` and
    ``weight_row_scale``."""

    def __init__(self, scheme: Scheme, context: ModelContext, names: dict[str, str], plain: frozenset[str]) -> None:
        super().__init__(context, names, plain)
        self._form, self._arrangement = _Form(scheme, context.dtype), arrangement(scheme)

    def parameters(self, layer: LinearBase, rows: int) -> Parameters:
        found = self._form.parameters(rows, layer.shard.columns, self._group(layer))
        return {f"weight{part}": parameter for part, parameter in found.items()}

    def part(self, layer: LinearBase, rows: RowMap, name: str) -> WeightLayout:
        return self._arrangement.layout(self._matrix(layer), layer.shard, rows, name)

    def _group(self, layer: LinearBase) -> int:
        return self._form.group(layer.shard.columns, next(iter(self._names.values())))

    def _matrix(self, layer: LinearBase) -> CodedMatrix:
        parameters = layer._parameters
        return self._form.matrix(lambda part: parameters.get(f"weight{part}"), self._group(layer), layer.shard.columns)

    def apply(self, layer: LinearBase, x: Tensor, bias: Tensor | None) -> Tensor:
        plain = layer._parameters.get("plain_weight")
        return coded_linear(x, self._matrix(layer), bias, plain, backend=self._context.backend)

    def apply_partial_sums(self, layer: LinearBase, x: Tensor, peers: PeerBuffers | None = None) -> Tensor:
        return coded_linear_parts(x, self._matrix(layer), backend=self._context.backend)

    def apply_silu_mul(self, layer: LinearBase, x: Tensor, bias: Tensor | None) -> Tensor:
        assert not self._plain, "gate and up are both quantised or both not"
        return coded_linear_silu_mul(x, self._matrix(layer), bias, backend=self._context.backend)

    def initial_range(self, layer: LinearBase, name: str) -> tuple[float, float]:
        if name == "plain_weight":
            return uniform_range(layer.shard.columns)
        return self._form.random_range(name.removeprefix("weight"), layer.shard.columns)


class CodedExperts(ExpertsMethod):
    """Experts with the coded matrices ``gate_up [E, 2 * I, H]`` and ``down [E, H, I]``, whose other parameters end in
    ``_scale``, ``_zero`` and ``_row_scale``."""

    def __init__(self, scheme: Scheme, context: ModelContext, name: str) -> None:
        self.scheme, self._context, self._name, self._form = scheme, context, name, _Form(scheme, context.dtype)

    def create(self, layer: Experts) -> None:
        for name, shard in shards(layer).items():
            group = self._form.group(shard.columns, self._name)
            for part, (shape, dtype) in self._form.parameters(shard.rows, shard.columns, group).items():
                layer.allocate(name, f"weight{part}", shape, dtype, self._context.device)
        self.layouts(layer)  # raises if groups do not fit

    def _matrices(self, layer: Experts, shared: bool = False) -> dict[str, CodedMatrix]:
        found, matrices = layer.matrices(shared), dict[str, CodedMatrix]()
        for name, shard in shards(layer).items():
            parts = {part: found.get(f"{name}{part}") for part in _PARTS}
            group = self._form.group(shard.columns, self._name)
            matrices[name] = self._form.matrix(parts.get, group, shard.columns)
        return matrices

    def layouts(self, layer: Experts) -> tuple[WeightLayout, ...]:
        """Tensors of single experts (``7.gate_proj.weight_packed``). Unquantised checkpoints and gpt-oss may also fuse
        tensors over experts."""
        matrices = self._matrices(layer)
        if self.scheme.source == "gpt-oss":
            return (gpt_oss_layout(layer, matrices["gate_up"], matrices["down"], self._name),)
        online = self.scheme.source == "online"
        if online and layer.interleaved:
            return (_interleaved(layer, matrices["gate_up"], matrices["down"]),)
        tensors = arrangement(self.scheme)
        single = one_by_one(
            layer, self._name, lambda name, place, *part: tensors.layout(matrices[name].expert(place), *part)
        )
        return (single, fused_layout(layer, *map(_Rows, matrices.values()))) if online else (single,)

    def apply(self, experts: Experts, x: Tensor, routed: Routed, peers: PeerBuffers | None = None) -> Tensor | SentRows:
        gate_up, down = self._matrices(experts, routed.shared is None).values()
        (weights, ids, shared, gate), extras, backend = routed, experts.extras, self._context.backend
        if peers is None:
            return coded_fused_moe(
                x, gate_up, down, weights, ids, extras=extras, shared=shared, shared_gate=gate, backend=backend
            )
        from weft.ops.moe.coded_experts import pair_outputs
        from weft.ops.moe.combine import send_experts

        return send_experts(pair_outputs(x, gate_up, down, routed.ids, extras), routed, peers)

    def initial_range(self, layer: Experts, name: str) -> tuple[float, float]:
        matrix = "gate_up" if name.startswith("gate_up") else "down"
        return self._form.random_range(name.removeprefix(matrix), shards(layer)[matrix].columns)


class _Rows:
    """The rows of all experts' matrices, indexed like a tensor ``[E, rows, columns]``. Values copied into it are
    quantised."""

    def __init__(self, matrix: CodedMatrix) -> None:
        self._matrix = matrix

    def __getitem__(self, index: tuple[slice, slice]) -> RoundedRows:
        _experts, rows = index
        matrix = self._matrix
        return RoundedRows(matrix._replace(words=matrix.words[:, :, rows], scales=matrix.scales[:, :, rows]))


def _interleaved(layer: Experts, gate_up: CodedMatrix, down: CodedMatrix) -> WeightLayout:
    """Unquantised experts of gpt-oss, rounded while they load."""
    half = layer.down_shard.columns
    gate, up = (
        RoundedRows(
            gate_up._replace(words=gate_up.words[:, :, rows], scales=gate_up.scales[:, :, rows]), transposed=True
        )
        for rows in (slice(half), slice(half, None))
    )
    return interleaved_layout(layer, gate, up, RoundedRows(down, transposed=True))
