"""Loading of weights: from checkpoint files, or random numbers, into a model's parameters."""

from weft.weights.loader import LoadReport, load_weights

__all__ = ["LoadReport", "load_weights"]
