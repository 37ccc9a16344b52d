"""Embeddings of n-grams, which are added to residual streams (Qwen4-Exp).

Job: hash the last tokens, look up embeddings, gate them by the streams, convolve. Owns: tables split over ranks by row,
and the other weights, whole on every rank. Does not know: who calls it with which streams.
"""

import torch
from torch import Tensor

from weft.config.model import ModelConfig
from weft.config.ngram import NGramConfig
from weft.forward_context import Batch, get_forward_context
from weft.graph.split_ops import split_op
from weft.layers.all_reduce import AllReduce
from weft.layers.context import ModelContext
from weft.layers.embedding import VocabParallelEmbedding
from weft.layers.linear import PackedLinear
from weft.layers.norm import StreamsNorm
from weft.layers.short_conv import convolve_rows
from weft.layers.weight import RowMap, RowRun, WeightLayout, WeightModule, empty_parameter, whole_rows
from weft.ops.ngram import last_tokens, ngram_rows


class NGramTables(VocabParallelEmbedding):
    """All tables of a layer, one after the other: ``[T] int64 -> [T, width / heads]``, this rank's part of the sum.

    Checkpoints store them in several tensors, or in one.
    """

    def __init__(self, num_rows: int, geometry: NGramConfig, context: ModelContext) -> None:
        super().__init__(num_rows, geometry.width // geometry.num_heads, context)
        self._shards = geometry.shards

    def layouts(self) -> tuple[WeightLayout, ...]:
        share, [run] = -(-self.vocab_size // self._shards), self._rows.runs
        pieces: WeightLayout = {}
        for i, start in enumerate(range(0, self.vocab_size, share)):
            end = min(start + share, self.vocab_size)
            first, last = max(start, run.source), min(end, run.source + run.count)
            own = (RowRun(first - start, first - run.source, last - first),) if first < last else ()
            pieces[f"shard_{i}.weight"] = RowMap(end - start, own).piece(self.weight)
        return (pieces, *super().layouts())


class SpacedConv(WeightModule):
    """Taps ``[C, kernel]`` of a depthwise convolution that are ``spacing`` tokens apart.

    Attributes:
        weight: the taps of a dense convolution: zeros between ``taps``, which are a view.
    """

    weight: Tensor

    def __init__(self, channels: int, kernel: int, spacing: int, context: ModelContext) -> None:
        super().__init__()
        dense = torch.zeros(channels, (kernel - 1) * spacing + 1, dtype=context.dtype, device=context.device)
        self.register_buffer("weight", dense, persistent=False)
        place = dense[:, ::spacing]
        self.taps = empty_parameter(channels, kernel, dtype=context.dtype, device=context.device, place=place)

    def layouts(self) -> tuple[WeightLayout, ...]:
        return ({"weight": whole_rows(self.taps.shape[0]).piece(self.taps, middle=(1,))},)


class NGramEmbedding(WeightModule):
    """``streams [T, N, hidden_size], input_ids [T] -> [T, N, hidden_size]``, which is added to the streams.

    Args:
        name: key of the layer's cache and of its entry in the layer table, for example ``model.layers.1.ple``.
    """

    def __init__(self, geometry: NGramConfig, config: ModelConfig, context: ModelContext, name: str) -> None:
        super().__init__()
        self.name, self._geometry, self._backend = name, geometry, context.backend
        self.width = geometry.channels
        place = geometry.layers.index(int(name.split(".")[-2]))
        sizes = torch.tensor(geometry.table_sizes(place))
        multipliers = torch.tensor(geometry.multipliers(place))
        self._multipliers, self._sizes = multipliers.to(context.device), sizes.to(context.device)
        self._offsets = (sizes.cumsum(0) - sizes).to(context.device)
        rows = -(-int(sizes.sum()) // geometry.multiple) * geometry.multiple
        self.ngram_embedding = NGramTables(rows, geometry, context)
        self._all_reduce = AllReduce.inside_a_layer(geometry.width, context)
        columns = {"0.": whole_rows(self.width), "1.": whole_rows(config.hidden_size).moved(self.width)}
        self.in_proj = PackedLinear(geometry.width, columns, bias=False, context=context)
        self.norm_key, self.norm_query, self.norm_conv = (
            StreamsNorm(geometry.streams, config, context) for _ in range(3)
        )
        self.conv1d = SpacedConv(self.width, geometry.conv_kernel, geometry.order, context)
        context.layers.register(name, self)

    def forward(self, streams: Tensor, input_ids: Tensor) -> Tensor:
        return self.mix(streams.flatten(1), input_ids).view(streams.shape)

    @split_op("ngram_embedding", width=lambda layer: layer.width)
    def mix(self, streams: Tensor, input_ids: Tensor) -> Tensor:
        """``[T, N * hidden_size]``, ``[T] -> [T, N * hidden_size]``."""
        context, geometry = get_forward_context(), self._geometry
        batch, cache = context.batch, context.caches[self.name]
        key, value = self.in_proj(self._embed(input_ids, cache["token"], batch)).split(
            [self.width, geometry.hidden_size], dim=-1
        )
        shape = geometry.streams, geometry.hidden_size
        key, query = self.norm_key(key.unflatten(-1, shape)), self.norm_query(streams.unflatten(-1, shape))
        gate = (key * query).sum(-1, keepdim=True) / geometry.hidden_size**0.5
        gate = gate.abs().clamp_min(1e-6).sqrt() * gate.sign()
        gated = gate.sigmoid() * value[:, None]
        normed, conv = self.norm_conv(gated).flatten(1), self.conv1d.weight
        return gated.flatten(1) + convolve_rows(normed, conv, None, cache["conv"], silu=True, backend=self._backend)

    def _embed(self, input_ids: Tensor, cache: Tensor, batch: Batch) -> Tensor:
        """``[T] -> [T, width]``."""
        geometry = self._geometry
        tokens = last_tokens(input_ids, cache, batch, geometry.order, geometry.eos)
        rows = ngram_rows(tokens, self._multipliers, self._sizes, self._offsets, geometry.heads)
        embedded = self.ngram_embedding(rows).flatten(1)
        return embedded if self._all_reduce is None else self._all_reduce(embedded)

    def layouts(self) -> tuple[WeightLayout, ...]:
        return ({},)
