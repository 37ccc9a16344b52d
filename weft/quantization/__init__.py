"""Storage and multiplication of the weights of linear layers and experts, in the model's dtype or in FP8."""

from weft.quantization.table import create_weights

__all__ = ["create_weights"]
