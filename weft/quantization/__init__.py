"""How the weights of linear layers and experts are stored and multiplied."""

from weft.quantization.table import create_weights

__all__ = ["create_weights"]
