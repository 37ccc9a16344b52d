"""A decoder that also reads images: the vision tower, and how its embeddings enter the forward pass.

Job: a causal language model with a tower. Owns: the static memory from which a step's tokens take embeddings of images.
Does not know: requests, the cache of embeddings, graphs.

A step's image tokens need no graphs of their own. Each has a row of its own after the vocabulary's rows of the
embedding matrix, and after the rows of the rotary table, and its token id and position name these rows. The runner
fills them before the step (``runner/media_inputs.py``); the kernels are those of text, and a step without images runs
as it does in a text model. The decoder's first layers add further features (DeepStack) to the tokens whose ids come
after the vocabulary. Steps of decodes have no such tokens and skip this.
"""

from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from weft.config.indexed_attention import PLACES_LAYER
from weft.config.model import ModelConfig
from weft.config.vision import VisionConfig
from weft.forward_context import LogitsRows, get_forward_context
from weft.layers.context import ModelContext
from weft.layers.indexer import PoolPlaces
from weft.models.decoder import CausalLM, Decoder
from weft.models.glm_vision import GlmVisionTower
from weft.models.inkling2_vision import Inkling2VisionTower
from weft.models.inkling_vision import InklingVisionTower
from weft.models.qwen_vision import QwenVisionTower
from weft.models.vision_tower import Tower
from weft.ops.vision import add_media_features


class VisionDecoder(Decoder):
    """A decoder whose first layers add features of images.

    Attributes:
        visual: the tower.
        features: ``[layers, rows, hidden_size]``: of the image token in each row, for each of the first layers.
    """

    def __init__(self, config: ModelConfig, context: ModelContext) -> None:
        super().__init__(config, context)
        assert config.vision is not None
        # The tower encodes one item at a time where bits must not depend on others (``MediaInputs.encode``).
        tower = _tower_class(config.vision)
        self.visual: Tower = tower(config.vision, replace(context, backend=context.backend.plain))
        self._backend = context.backend
        shape = (len(config.vision.deepstack_indexes), context.num_media_rows, config.hidden_size)
        self.features = torch.zeros(shape, dtype=context.dtype, device=context.device)

    def place_media(self, rows: Tensor, embeddings: Tensor, token_ids: Tensor) -> None:
        """Put image tokens into ``rows [N]``: their embeddings and features ``[N, num_features, hidden_size]``.

        Args:
            token_ids: ``[N]`` int64, the placeholders in the prompt.
        """
        self.embed_tokens.media_rows.index_copy_(0, rows, embeddings[:, 0])
        for layer, features in enumerate(self.features):
            features.index_copy_(0, rows, embeddings[:, 1 + layer])

    def after_layer(self, index: int, residual: Tensor, input_ids: Tensor, rows: LogitsRows | None) -> Tensor:
        """Adds features to the residual, which is whole where x may be part of a sum."""
        if index >= len(self.features) or not get_forward_context().batch.may_have_media:
            return residual
        ids = input_ids if rows is None else rows.of(input_ids)
        first_id, features = self.embed_tokens.vocab_size, self.features[index]
        return add_media_features(residual, ids, features, first_id, backend=self._backend)


def _tower_class(vision: VisionConfig) -> type[Tower]:
    if vision.glm is not None:
        return GlmVisionTower
    if vision.inkling is not None:
        return InklingVisionTower
    return QwenVisionTower if vision.inkling2 is None else Inkling2VisionTower


class VisionLanguageModel(CausalLM):
    """A text model with its tower.

    Attributes:
        rotary_table: the table whose last rows are a step's image tokens'. None: the decoder has no rotary positions.
        pool_places: the positions in each of its rows, if indexers store positions.
    """

    decoder: ClassVar[type[VisionDecoder]] = VisionDecoder

    def __init__(self, config: ModelConfig, context: ModelContext) -> None:
        super().__init__(config, context)
        self.rotary_table = context.rotary.only
        self.pool_places: PoolPlaces | None = context.layers.get(PLACES_LAYER)
