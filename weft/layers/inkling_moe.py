"""Mixtures of experts of the Inkling family.

Job: experts that checkpoints store in one tensor, experts that every token has, learned factors, a router in float32.
Does not know: how weights are stored, which layers are sparse.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.config.model import ModelConfig
from weft.config.moe import MoeConfig
from weft.errors import ConfigError
from weft.layers.context import ModelContext
from weft.layers.moe import Experts, SparseMoe
from weft.layers.weight import (
    WeightLayout,
    WeightModule,
    WeightPiece,
    concatenated,
    empty_parameter,
    in_turn,
    one_tensor,
    whole,
)


class InTurnExperts(Experts):
    """Experts whose checkpoints hold one tensor with rows of gate and up in turn, and one tensor of down."""

    _takes_scales = True

    def _single(self) -> tuple[WeightLayout, list[str]]:
        """The layout of single matrices, and which tensors each of them has.

        Raises:
            ConfigError: some tensor does not have the rows of the matrix.
        """
        [single] = (layout for layout in super().layouts() if any(name.startswith("0.down_proj.") for name in layout))
        pieces = {name.removeprefix("0.down_proj."): p for name, p in single.items() if name.startswith("0.down_proj.")}
        has_rows = len({piece.shape[0] for piece in pieces.values()}) == 1
        if "weight" not in pieces or not has_rows or (len(pieces) > 1 and not self._takes_scales):
            raise ConfigError(
                f"experts with {', '.join(pieces)} are not supported where one tensor holds rows of gate and up in "
                "turn; use a checkpoint with plain experts and quantization='fp8' or 'int4', which quantise while "
                "loading"
            )
        return single, list(pieces)

    def _by_expert(
        self, single: WeightLayout, tensor: str
    ) -> tuple[list[tuple[WeightPiece, WeightPiece]], list[WeightPiece]]:
        """One tensor of the gate and up matrices by expert, and of the down matrices."""
        gate, up, down = (
            [single[f"{i}.{part}_proj.{tensor}"] for i in range(self.num_experts)] for part in ("gate", "up", "down")
        )
        return list(zip(gate, up, strict=True)), down

    def layouts(self) -> tuple[WeightLayout, ...]:
        single, tensors = self._single()
        layout = WeightLayout()
        for tensor in tensors:
            both, down = self._by_expert(single, tensor)
            name = tensor.removesuffix("_inv")
            layout[f"w13_{name}"] = one_tensor([in_turn(pair) for pair in both])
            layout[f"w2_{name}"] = one_tensor(down)
        return single, layout


class ExpertsWithShared(InTurnExperts):
    """Experts of which the last, the shared ones, are chosen for every token (Inkling).

    Checkpoints store all routed experts in one tensor and all shared experts in another, without scales.
    """

    _takes_scales = False

    def __init__(self, moe: MoeConfig, hidden_size: int, context: ModelContext, *, gated: bool) -> None:
        super().__init__(moe, hidden_size, context, gated=gated)
        self._num_routed = moe.num_experts - moe.num_always

    def layouts(self) -> tuple[WeightLayout, ...]:
        single, [tensor] = self._single()
        both, down = self._by_expert(single, tensor)
        gate, up = zip(*both, strict=True)
        routed, shared = slice(self._num_routed), slice(self._num_routed, None)
        return single, {
            "gate_up_proj": one_tensor([concatenated(pair) for pair in both[routed]]),
            "down_proj": one_tensor(down[routed]),
            "shared_gate_proj": one_tensor(gate[shared]),
            "shared_up_proj": one_tensor(up[shared]),
            "shared_down_proj": one_tensor(down[shared]),
        }, {
            "w13_weight": one_tensor([in_turn(pair) for pair in both[routed]]),
            "w2_weight": one_tensor(down[routed]),
            "shared_w13_weight": one_tensor([in_turn(pair) for pair in both[shared]]),
            "shared_w2_weight": one_tensor(down[shared]),
        }  # fmt: skip


class ScaledMoe(SparseMoe):
    """Experts whose weights have a learned factor, shared ones among them (Inkling)."""

    _experts = ExpertsWithShared

    def __init__(self, config: ModelConfig, context: ModelContext) -> None:
        super().__init__(config, context)
        self.global_scale = empty_parameter(1, dtype=torch.float32, device=context.device)

    def _route(self, logits: Tensor, shared: bool, shared_gate: Tensor | None) -> tuple[Tensor, Tensor]:
        weights, ids = super()._route(logits, shared, shared_gate)
        return weights * self.global_scale, ids

    def layouts(self) -> tuple[WeightLayout, ...]:
        assert self.correction_bias is not None
        names = {"gate.global_scale": self.global_scale, "gate.e_score_correction_bias": self.correction_bias}
        return ({name: whole(parameter) for name, parameter in names.items()},)

    def initial_range(self, name: str) -> tuple[float, float]:
        return (0.9, 1.1) if name == "global_scale" else super().initial_range(name)


class Float32Router(WeightModule):
    """Logits of a router in float32: ``[T, hidden_size] -> [T, num_experts]``, whole on every rank."""

    def __init__(self, num_experts: int, hidden_size: int, context: ModelContext) -> None:
        super().__init__()
        self.weight = empty_parameter(num_experts, hidden_size, dtype=torch.float32, device=context.device)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.float(), self.weight)

    def layouts(self) -> tuple[WeightLayout, ...]:
        return ({"0.weight": whole(self.weight)},)


class ExactlyRoutedMoe(SparseMoe):
    """Experts that a router in float32 chooses (Inkling 2)."""

    _experts = InTurnExperts

    def __init__(self, config: ModelConfig, context: ModelContext) -> None:
        super().__init__(config, context)
        self.router = Float32Router(self._moe.num_experts, config.hidden_size, context)
