"""From a model config to a model."""

from torch import nn

from weft.config.convolutional_attention import ConvolutionalAttentionConfig
from weft.config.inkling import RelativeAttentionConfig
from weft.config.inkling2 import ClippedAttentionConfig
from weft.config.model import ModelConfig
from weft.config.ngram import NGramConfig
from weft.config.shared_block import SharedBlockConfig
from weft.layers.context import ModelContext
from weft.models.decoder import CausalLM
from weft.models.inkling import InklingModel, InklingVisionModel
from weft.models.inkling2 import Inkling2Model, Inkling2VisionModel
from weft.models.mtp import MultiTokenPredictor, StreamsPredictor
from weft.models.mtp_chain import ChainedPredictor
from weft.models.ngram import NGramModel, NGramVisionModel
from weft.models.shared_block import SharedBlockModel
from weft.models.vision_language import VisionLanguageModel
from weft.models.zaya import ZayaModel
from weft.quantization import create_weights

_MODELS: dict[type, type[CausalLM]] = {
    NGramConfig: NGramModel, SharedBlockConfig: SharedBlockModel, ConvolutionalAttentionConfig: ZayaModel,
    RelativeAttentionConfig: InklingModel, ClippedAttentionConfig: Inkling2Model,
}  # fmt: skip
"""Models with a decoder of their own, by the geometry of their layers' mixers."""

_VISION_MODELS: dict[type, type[CausalLM]] = {
    NGramConfig: NGramVisionModel, RelativeAttentionConfig: InklingVisionModel,
    ClippedAttentionConfig: Inkling2VisionModel,
}  # fmt: skip
"""Models of ``_MODELS`` that read images."""


def create_model(config: ModelConfig, context: ModelContext) -> CausalLM:
    """Build the model with uninitialised parameters on ``context.device`` and fill ``context.layers``.

    Raises:
        ConfigError: a dimension does not divide over the tensor-parallel group, or not into blocks of FP8 weights.
    """
    model = _model_class(config)(config, context).eval()
    if config.runs_mtp:
        model.add_module("mtp", _head_class(config)(config, context).eval())
    create_weights(model, config.quantization, context)
    return model


def _head_class(config: ModelConfig) -> type[nn.Module]:
    if config.mtp_chain:
        return ChainedPredictor
    return StreamsPredictor if config.returns_streams else MultiTokenPredictor


def _model_class(config: ModelConfig) -> type[CausalLM]:
    models, plain = (_VISION_MODELS, VisionLanguageModel) if config.runs_vision else (_MODELS, CausalLM)
    kinds = {type(geometry) for modules in config.mixers.values() for geometry in modules.values()}
    return next((model for kind, model in models.items() if kind in kinds), plain)
