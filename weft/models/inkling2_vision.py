"""The vision tower of Inkling 2.

Job: embed patches and class tokens, run blocks whose halves are scaled by channel, and project squares of patches.
Owns: module names, which are mostly the published ones. Does not know: files, requests, where embeddings are kept.

A class token precedes the patches of an image, and patches and token attend to each other. The token has a whole square
of rows, so that squares of patches stay squares of rows. All rows of the square hold the token. The last one alone is
attended to, and the square's embedding is not read.
"""

import torch
from torch import Tensor, nn

from weft.config.vision import Inkling2TowerConfig, VisionConfig
from weft.layers.context import ModelContext
from weft.layers.vision import PositionGrid, VisionLayerNorm, VisionLinear
from weft.layers.weight import WeightLayout, WeightModule, WeightPiece, empty_parameter, whole
from weft.models.qwen_vision import VisionAttention
from weft.models.vision_tower import Attend, PatchEmbedding, VisionTower


class FlatPatchEmbedding(PatchEmbedding):
    """``[N, patch_dim] -> [N, hidden_size]``: one product, of patches whose channels come last."""

    def __init__(self, config: VisionConfig, context: ModelContext) -> None:
        nn.Module.__init__(self)
        self.proj = VisionLinear(config.patch_dim, config.hidden_size, context, bias=False)


class ClassToken(WeightModule):
    """The token before an image, with its learned position. Both are ``[size]``."""

    def __init__(self, size: int, context: ModelContext) -> None:
        super().__init__()
        self.class_embedding, self.cls_position_embedding = (
            empty_parameter(size, dtype=context.dtype, device=context.device) for _ in range(2)
        )

    def forward(self) -> Tensor:
        return self.class_embedding + self.cls_position_embedding

    def layouts(self) -> tuple[WeightLayout, ...]:
        return ({name: whole(parameter) for name, parameter in self.named_parameters()},)

    def initial_range(self, name: str) -> tuple[float, float]:
        return -0.1, 0.1


class LayerScale(WeightModule):
    """``x * gamma``, ``[N, size]``."""

    def __init__(self, size: int, context: ModelContext) -> None:
        super().__init__()
        self.gamma = empty_parameter(size, dtype=context.dtype, device=context.device)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma

    def layouts(self) -> tuple[WeightLayout, ...]:
        return ({"gamma": whole(self.gamma)},)

    def initial_range(self, name: str) -> tuple[float, float]:
        return 0.05, 0.15


class PairedHeads(VisionLinear):
    """Queries, keys and values as one product, from checkpoints whose heads rotate neighbouring channels.

    The even channels of a head of queries or keys become its first half here, and the odd ones its second half, which
    ``rotate_patches`` turns together. Scores do not depend on the order of channels.
    """

    def __init__(self, size: int, num_heads: int, context: ModelContext) -> None:
        super().__init__(size, 3 * size, context)
        self._size, self._heads = size, num_heads

    def layouts(self) -> tuple[WeightLayout, ...]:
        parts = ((name, parameter.split(self._size)) for name, parameter in self.named_parameters())
        place = (self._paired, self._paired, whole)
        return ({f"{i}.{name}": place[i](third) for name, thirds in parts for i, third in enumerate(thirds)},)

    def _paired(self, parameter: Tensor) -> WeightPiece:
        width = self._size // self._heads
        copies = tuple(
            ((slice(first + i, first + width, 2),), parameter[first + i * width // 2 :][: width // 2])
            for first in range(0, self._size, width)
            for i in range(2)
        )
        return WeightPiece(tuple(parameter.shape), copies)


class Inkling2VisionAttention(VisionAttention):
    """``[N, hidden_size] -> [N, hidden_size]``."""

    def __init__(self, config: VisionConfig, context: ModelContext) -> None:
        super().__init__(config, context)
        self.qkv = PairedHeads(config.hidden_size, config.num_heads, context)


class Inkling2VisionMlp(nn.Module):
    """``[N, hidden_size] -> [N, hidden_size]``."""

    def __init__(self, config: VisionConfig, context: ModelContext) -> None:
        super().__init__()
        self._activation = config.activation
        self.c_fc = VisionLinear(config.hidden_size, config.intermediate_size, context)
        self.c_proj = VisionLinear(config.intermediate_size, config.hidden_size, context)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(self.c_fc.activated(x, self._activation))


class Inkling2VisionBlock(nn.Module):
    """Pre-norm block: ``x, y`` to ``x, y``, of which the sum is the residual stream; ``y`` is None before the first."""

    def __init__(self, config: VisionConfig, eps: float, context: ModelContext) -> None:
        super().__init__()
        size = config.hidden_size
        self.ln_1, self.ln_2 = (VisionLayerNorm(size, context, eps=eps) for _ in range(2))
        self.ls_1, self.ls_2 = (LayerScale(size, context) for _ in range(2))
        self.attn = Inkling2VisionAttention(config, context)
        self.mlp = Inkling2VisionMlp(config, context)

    def forward(self, x: Tensor, y: Tensor | None, cos_sin: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
        x, normed = (x, self.ln_1(x)) if y is None else self.ln_1.add(x, y)
        x, normed = self.ln_2.add(x, self.ls_1(self.attn(normed, cos_sin, attend)))
        return x, self.ls_2(self.mlp(normed))


class Inkling2VisionTower(VisionTower):
    """Blocks over learned positions, and an MLP over squares of patches."""

    embedding = FlatPatchEmbedding

    def __init__(self, config: VisionConfig, context: ModelContext) -> None:
        super().__init__(config, context)
        own = config.inkling2
        assert own is not None
        self.embeddings = ClassToken(config.hidden_size, context)
        self.pos_embed = PositionGrid(config.num_position_embeddings, config.hidden_size, context, centred=True)
        self.ln_pre = VisionLayerNorm(config.hidden_size, context, eps=own.norm_eps)
        self.layers = nn.ModuleList(Inkling2VisionBlock(config, own.norm_eps, context) for _ in range(config.depth))
        self.proj_in, self.proj_out = _projector(config, own, context)

    def encode(self, x: Tensor, places: Tensor, cos_sin: Tensor, attend: Attend) -> Tensor:
        patches = x + self.pos_embed(places)
        x, y = self.ln_pre(torch.where(places[:, :1] < 0, self.embeddings(), patches)), None
        for block in self.layers:
            x, y = block(x, y, cos_sin, attend)
        assert y is not None, "a tower has blocks"
        squares = (x + y).view(-1, self.config.hidden_size * self.config.merge_unit)
        embeddings: Tensor = self.proj_out(self.proj_in.activated(squares, self.config.activation))
        return embeddings[:, None]

    def _rotation(self, places: Tensor) -> Tensor:
        """Places start at one, since class tokens have zero. The first half turns by the column."""
        return super()._rotation((places + 1).flip(1))


def _projector(
    config: VisionConfig, own: Inkling2TowerConfig, context: ModelContext
) -> tuple[VisionLinear, VisionLinear]:
    merged, inner = config.hidden_size * config.merge_unit, own.projector_size
    return (
        VisionLinear(merged, inner, context, bias=own.projector_bias),
        VisionLinear(inner, config.out_hidden_size, context, bias=own.projector_bias),
    )
