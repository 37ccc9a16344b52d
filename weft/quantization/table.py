"""Which method stores and multiplies each layer's weights: chosen once, when the model has been built.

Job: walk through a new model, give every linear layer and all experts a method, and create their weights. Does not
know: what methods do.
"""

from __future__ import annotations

from weft.layers.context import ModelContext
from weft.layers.linear import LinearBase
from weft.layers.moe import Experts
from weft.layers.weight import LoadableModel
from weft.quantization.unquantized import UnquantizedExperts, UnquantizedLinear


def create_weights(model: LoadableModel, context: ModelContext) -> None:
    """Allocate the weights of all linear layers and experts of ``model``, uninitialised."""
    for module in model.modules():
        if isinstance(module, LinearBase):
            module.quant_method = UnquantizedLinear(context)
            module.quant_method.create(module)
        elif isinstance(module, Experts):
            module.quant_method = UnquantizedExperts(context)
            module.quant_method.create(module)
