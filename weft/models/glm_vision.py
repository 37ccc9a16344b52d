"""The vision tower of GLM-5.3.

Job: run blocks with RMSNorms and normalised heads, merge squares of patches by a convolution, and pass the result
through a gated MLP. Owns: module names, which are the published ones. Does not know: files, requests, where embeddings
are kept.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from weft.config.vision import GlmTowerConfig, VisionConfig
from weft.layers.context import ModelContext
from weft.layers.norm import ResidualRMSNorm, RMSNorm
from weft.layers.vision import VisionGateUp, VisionLayerNorm, VisionLinear
from weft.models.qwen_vision import VisionAttention
from weft.models.vision_tower import Attend, VisionTower
from weft.ops.vision import norm_rotate_patches


class GlmVisionAttention(VisionAttention):
    """``[N, hidden_size] -> [N, hidden_size]``, with an RMSNorm of every query and key head."""

    def __init__(self, config: VisionConfig, glm: GlmTowerConfig, context: ModelContext) -> None:
        super().__init__(config, context, bias=glm.bias)
        self._eps, head_dim = glm.norm_eps, config.hidden_size // config.num_heads
        self.q_norm, self.k_norm = (RMSNorm(head_dim, glm.norm_eps, context, zero_centered=False) for _ in "qk")

    def rotate(self, qkv: Tensor, cos_sin: Tensor) -> Tensor:
        weights = self.q_norm.weight, self.k_norm.weight
        return norm_rotate_patches(qkv, *weights, self._eps, cos_sin, backend=self._backend)


class GlmVisionMlp(nn.Module):
    """Clamped SwiGLU: ``[N, size] -> [N, size]``."""

    def __init__(self, size: int, inner: int, limit: float, context: ModelContext, *, bias: bool) -> None:
        super().__init__()
        self.gate_up_proj = VisionGateUp(size, inner, limit, context, bias=bias)
        self.down_proj = VisionLinear(inner, size, context, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.gate_up_proj(x))


class GlmVisionBlock(nn.Module):
    """Pre-norm block: ``x, residual`` to ``x, residual``, of which the sum is the residual stream."""

    def __init__(self, config: VisionConfig, glm: GlmTowerConfig, context: ModelContext) -> None:
        super().__init__()
        self.norm1, self.norm2 = (_residual_norm(config, glm, context) for _ in range(2))
        self.attn = GlmVisionAttention(config, glm, context)
        self.mlp = GlmVisionMlp(config.hidden_size, config.intermediate_size, glm.swiglu_limit, context, bias=glm.bias)

    def forward(self, x: Tensor, residual: Tensor | None, cos_sin: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
        normed, residual = self.norm1.add(x, residual)
        normed, residual = self.norm2.add(self.attn(normed, cos_sin, attend), residual)
        return self.mlp(normed), residual


class SquareMerge(VisionLinear):
    """``[N, hidden_size] -> [N / merge_unit, out_hidden_size]``: a convolution over squares of patches."""

    def __init__(self, config: VisionConfig, context: ModelContext) -> None:
        side, self._unit = config.spatial_merge_size, config.merge_unit
        merged, kernel = config.hidden_size * config.merge_unit, (config.hidden_size, side, side)
        super().__init__(merged, config.out_hidden_size, context, kernel=kernel)

    def forward(self, x: Tensor) -> Tensor:
        squares = x.view(-1, self._unit, x.shape[-1]).transpose(1, 2)  # the kernel has channels first
        return super().forward(squares.flatten(1))


class GlmMerger(GlmVisionMlp):
    """``[M, out_hidden_size] -> [M, out_hidden_size]``."""

    def __init__(self, config: VisionConfig, glm: GlmTowerConfig, context: ModelContext) -> None:
        size = config.out_hidden_size
        super().__init__(size, glm.merger_size, glm.swiglu_limit, context, bias=False)
        self.proj = VisionLinear(size, size, context, bias=False)
        self.post_projection_norm = VisionLayerNorm(size, context, eps=1e-5)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.gelu(self.post_projection_norm(self.proj(x))))


class GlmVisionTower(VisionTower):
    """Blocks with RMSNorms and no learned positions."""

    def __init__(self, config: VisionConfig, context: ModelContext) -> None:
        super().__init__(config, context)
        glm = config.glm
        assert glm is not None
        self.blocks = nn.ModuleList(GlmVisionBlock(config, glm, context) for _ in range(config.depth))
        self.post_layernorm = _residual_norm(config, glm, context)
        self.downsample = SquareMerge(config, context)
        self.merger = GlmMerger(config, glm, context)

    def encode(self, x: Tensor, places: Tensor, cos_sin: Tensor, attend: Attend) -> Tensor:
        residual: Tensor | None = None
        for block in self.blocks:
            x, residual = block(x, residual, cos_sin, attend)
        normed, _ = self.post_layernorm.add(x, residual)
        embeddings: Tensor = self.merger(self.downsample(normed))
        return embeddings[:, None]


def _residual_norm(config: VisionConfig, glm: GlmTowerConfig, context: ModelContext) -> ResidualRMSNorm:
    return ResidualRMSNorm(config.hidden_size, glm.norm_eps, context, zero_centered=False, partial=False)
