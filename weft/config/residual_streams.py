"""Residual streams (hyper-connections, arXiv 2409.19606): geometry."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class StreamsConfig:
    """Several residual streams in place of one. A block reads a mixture of them and adds its output to every stream.

    Attributes:
        form: ``sinkhorn``: the streams are also mixed with each other, by a doubly stochastic matrix (arXiv
            2512.24880). ``gated``: every channel of every stream has a gate of low rank (Qwen4-Exp).
            ``blocks``: there is one stream. Layers also read its states before earlier blocks of layers (Inkling 2).
        count: number of streams, or of layers in a block.
        iterations, eps: of the Sinkhorn-Knopp algorithm.
        rank: of the gates.
    """

    form: Literal["sinkhorn", "gated", "blocks"]
    count: int
    iterations: int = 0
    eps: float = 0.0
    rank: int = 0

    def num_weights(self, hidden_size: int) -> int:
        """Number of weights of one connection."""
        if self.form == "blocks":
            return hidden_size
        width = self.count * hidden_size
        return width * (2 * self.rank + self.count if self.form == "gated" else self.count * (self.count + 2))
