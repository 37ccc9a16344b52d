"""Embeddings of n-grams that are added to residual streams (Qwen4-Exp): geometry, hashes, cache.

Job: the numbers of such a layer, and what follows from them alone: sizes of hash tables and multipliers of hashes. Does
not know: weights, streams.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from weft.config.json_object import JsonObject
from weft.config.layer_spec import CacheDtypes, CacheTensor, LayerSpec

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_SEED_STEP = 10007


@dataclass(frozen=True, slots=True)
class NGramConfig:
    """Geometry of n-gram embeddings in the whole model.

    Every n-gram of 2 to ``order`` tokens that ends at a token has ``heads`` hashes, each with a table of its own.

    Attributes:
        layers: decoder layers that have such embeddings, in order.
        width: of all embeddings of a token together.
        streams: number of residual streams.
        conv_kernel: taps of the convolution, which are ``order`` tokens apart.
        vocab_size, eos: number of token ids, and the id at which a text begins anew.
        table_size: rows of a table, at least. Tables have different prime sizes.
        multiple: the rows of all tables together are padded to a multiple of this number.
        shards: tensors in which checkpoints store the tables of a layer.
        seed: of the hashes.
    """

    layers: tuple[int, ...]
    order: int
    heads: int
    width: int
    hidden_size: int
    streams: int
    conv_kernel: int
    vocab_size: int
    eos: int
    table_size: int
    multiple: int
    shards: int
    seed: int

    @property
    def num_heads(self) -> int:
        return (self.order - 1) * self.heads

    @property
    def channels(self) -> int:
        """Channels of the convolution: those of all streams."""
        return self.streams * self.hidden_size

    @property
    def history(self) -> int:
        """Tokens before a token that the convolution reads."""
        return (self.conv_kernel - 1) * self.order

    def layer_spec(self, hidden_size: int, dtypes: CacheDtypes) -> LayerSpec:
        """The token's id per entry, and the state ``conv [channels, history]``. Both are whole on every rank."""
        weights = self.width * (self.channels + hidden_size)
        return LayerSpec(
            paged=(CacheTensor("token", (1,), "float32"),),  # exact for ids below 2^24
            states=(CacheTensor("conv", (self.channels, self.history), dtypes.model),),
            verifies=True,
            num_weights=weights + self.channels * self.conv_kernel,
            num_table_weights=self.table_size * self.width,
        )

    def check_shares(self, tp_size: int) -> None:
        """Any number of ranks can share the tables."""

    def table_sizes(self, place: int) -> list[int]:
        """Sizes of the tables of the layer at ``place`` in ``layers``: the primes from ``table_size`` on, in order."""
        primes = _primes_from(self.table_size)
        found = [next(primes) for _ in range((place + 1) * self.num_heads)]
        return found[place * self.num_heads :]

    def multipliers(self, place: int) -> list[int]:
        """Odd numbers by which a hash multiplies the last tokens, the last one first."""
        bound = max(1, ((1 << 63) - 1) // self.vocab_size // 2)
        seed = self.seed + _SEED_STEP * place
        return [2 * (_splitmix((seed + _GAMMA * (i + 1)) & _MASK) % bound) + 1 for i in range(self.order)]


def _primes_from(number: int) -> Iterator[int]:
    while True:
        if number > 1 and all(number % divisor for divisor in range(2, math.isqrt(number) + 1)):
            yield number
        number += 1


def _splitmix(value: int) -> int:
    """One step of SplitMix64 (Steele, Lea and Flood, 2014)."""
    value = (value + _GAMMA) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def read_ngrams(text: JsonObject) -> NGramConfig:
    """Read the keys of n-gram embeddings. ``ple_layer_ids`` count from 1.

    Raises:
        ConfigError: numbers do not divide, or no text ends.
    """
    order, heads = text.integer("ngram_size", low=2), text.integer("heads_per_ngram")
    width, eos = text.integer("ple_embed_dim", text.integer("hidden_size")), text.integers("eos_token_id")
    if width % ((order - 1) * heads):
        raise text.wrong("ple_embed_dim", f"a multiple of the {(order - 1) * heads} n-gram heads")
    if not eos:
        raise text.wrong("eos_token_id", "an id, at which n-grams begin anew")
    return NGramConfig(
        layers=ngram_layers(text),
        order=order,
        heads=heads,
        width=width,
        hidden_size=text.integer("hidden_size"),
        streams=text.integer("hc_count", low=2),
        conv_kernel=text.integer("ple_conv_kernel_size", low=2),
        vocab_size=text.integer("vocab_size"),
        eos=eos[0],
        table_size=text.integer("ngram_vocab_size_base"),
        multiple=text.integer("make_ngram_vocab_size_divisible_by"),
        shards=text.integer("split_ngram_parts"),
        seed=text.integer("seed", low=0),
    )


def ngram_layers(text: JsonObject) -> tuple[int, ...]:
    """Decoder layers with n-gram embeddings, counted from 0."""
    return tuple(sorted({i - 1 for i in text.integers("ple_layer_ids")}))
