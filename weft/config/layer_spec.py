"""``LayerSpec``: the cache tensors that a layer keeps per sequence, and their costs.

Job: the vocabulary of caches. Each kind of layer (attention, Gated DeltaNet, ...) derives a ``LayerSpec`` from its
geometry. Pool sizes, cache tensors, copies, checkpoints, chunk tables and eviction costs follow from the specs. Does
not know: kinds of layers, tensors, pools. It needs no torch, so ``weft config`` plans without building a model.

A layer may have both kinds of tensors. *Paged* tensors grow with the sequence, one entry per token, in pages. *State*
tensors have one entry per sequence, in slots, and are copied when a prefix is reused.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, Self

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1}


@dataclass(frozen=True, slots=True)
class CacheDtypes:
    """The dtype names from which a layer chooses for its cache tensors.

    Attributes:
        model: dtype of weights and activations.
        kv: dtype of keys and values.
    """

    model: str = "float32"
    kv: str = "float32"
    state: str = "float32"


@dataclass(frozen=True, slots=True)
class CacheTensor:
    """One named tensor of a layer's cache.

    Attributes:
        name: the key under which the layer finds the tensor, for example ``"k"`` or ``"conv"``.
        shape: shape of one entry: of one token if paged, of one slot otherwise.
        sharded_dim: dimension of ``shape`` that is split over the tensor-parallel ranks; None: whole on every rank.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    sharded_dim: int | None = None

    @property
    def entry_bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]

    def on_rank(self, tp_size: int) -> Self:
        """The share of one rank. A dimension smaller than the number of ranks is replicated, down to 1."""
        if self.sharded_dim is None or tp_size == 1:
            return self
        shape = list(self.shape)
        shape[self.sharded_dim] = max(1, shape[self.sharded_dim] // tp_size)
        return replace(self, shape=tuple(shape))


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """The cache of one layer, and the cost of a token in the layer.

    Attributes:
        paged: tensors ``[num_pages, page_size, *shape]``.
        states: tensors ``[num_slots, *shape]``. Prefills run in chunks, and a state can be stored at the end of a
            chunk.
        verifies: the layer reads ``Batch.verification``: it can run a few tokens of every sequence and store the state
            after each. Other layers with states run drafts as a prefill, or decode drafts one by one.
        page_multiple: pages hold a multiple of so many tokens.
        num_weights: weights of the token mixer that one token uses, of the whole model; two FLOPs each.
        num_plain_weights: those of ``num_weights`` that are never quantised.
        num_reused_weights: those of ``num_weights`` that other layers own, on average over the layers of this kind.
        num_table_weights: weights of tables, of which a token reads some rows.
        flops_per_token: FLOPs of one token without the weights (decay, read and write of a state).
        flops_per_pair: FLOPs of attention for one pair of a token and an earlier one.
    """

    paged: tuple[CacheTensor, ...] = ()
    states: tuple[CacheTensor, ...] = ()
    verifies: bool = False
    page_multiple: int = 1
    num_weights: int = 0
    num_plain_weights: int = 0
    num_reused_weights: float = 0.0
    num_table_weights: int = 0
    flops_per_token: float = 0.0
    flops_per_pair: float = 0.0

    def __post_init__(self) -> None:
        names = [tensor.name for tensor in (*self.paged, *self.states)]
        assert len(names) == len(set(names)), f"cache tensors need names of their own: {names}"

    @property
    def num_own_weights(self) -> float:
        """Weights of the token mixer that the layer owns."""
        return self.num_weights - self.num_reused_weights

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's entries."""
        return _total_bytes(self.paged)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot's entries."""
        return _total_bytes(self.states)

    def on_rank(self, tp_size: int) -> Self:
        """The spec of one of ``tp_size`` ranks. Costs remain those of the whole model."""
        paged, states = (tuple(t.on_rank(tp_size) for t in tensors) for tensors in (self.paged, self.states))
        return replace(self, paged=paged, states=states)


class MixerConfig(Protocol):
    """The geometry of one kind of token mixer in the whole model, a frozen value read from ``config.json``."""

    def layer_spec(self, hidden_size: int, dtypes: CacheDtypes) -> LayerSpec:
        """The cache tensors and costs of such a layer."""
        ...

    def check_shares(self, tp_size: int) -> None:
        """Check that ``tp_size`` ranks can share the layer.

        Raises:
            ConfigError: a number of the layer does not divide; the message names it.
        """
        ...


def _total_bytes(tensors: Sequence[CacheTensor]) -> int:
    return sum(tensor.entry_bytes for tensor in tensors)
