"""The choice of a model's kind of mixture of experts."""

from weft.config.model import ModelConfig
from weft.layers.context import ModelContext
from weft.layers.inkling_moe import ExactlyRoutedMoe, ScaledMoe
from weft.layers.moe import LatentMoe, MlpRoutedMoe, SparseMoe


def sparse_moe(config: ModelConfig, context: ModelContext) -> SparseMoe:
    """The model's kind of mixture of experts."""
    assert config.moe is not None, "a sparse layer needs the model config's moe"
    if config.moe.router_size is not None:
        return MlpRoutedMoe(config, context)
    if config.multipliers.learned_mlp:
        return ScaledMoe(config, context)
    if config.moe.softcapped is not None:
        return ExactlyRoutedMoe(config, context)
    return (SparseMoe if config.moe.latent_size is None else LatentMoe)(config, context)
