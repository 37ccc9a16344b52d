"""The decoder that all supported families share: embedding, layers, final norm, head.

Job: assemble layers as a ``ModelConfig`` says and keep the residual stream fused with the norms. Owns: module names,
which are the published tensors' names up to merging (``weight_names.py``), and which layer computes which kind of token
mixer. Does not know: caches, batches, graphs, files.
"""

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from weft.config.attention import AttentionConfig
from weft.config.convolutional_attention import ConvolutionalAttentionConfig
from weft.config.gated_delta_net import GatedDeltaNetConfig
from weft.config.indexed_attention import IndexedAttentionConfig, IndexedLatentConfig
from weft.config.inkling import OutputConvConfig, RelativeAttentionConfig
from weft.config.inkling2 import ClippedAttentionConfig
from weft.config.kimi import KimiDeltaConfig, LatentAttentionConfig
from weft.config.lightning_attention import LightningAttentionConfig
from weft.config.mamba import HeadedMambaConfig, MambaConfig
from weft.config.mamba2 import Mamba2Config
from weft.config.model import ModelConfig, layer_name
from weft.config.ngram import NGramConfig
from weft.config.recurrent_gemma import RgLruConfig
from weft.config.shared_block import SharedBlockConfig
from weft.config.short_conv import ShortConvConfig
from weft.config.sliding_window import SlidingWindowConfig
from weft.forward_context import LogitsRows, get_forward_context, other_batch
from weft.layers.all_reduce import AllReduce
from weft.layers.attention import Attention
from weft.layers.clipped_attention import clipped_attention
from weft.layers.context import ModelContext
from weft.layers.convolutional_attention import convolutional_attention
from weft.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from weft.layers.gated_delta_net import GatedDeltaNet
from weft.layers.headed_mamba import HeadedMamba
from weft.layers.indexed_attention import IndexedAttention
from weft.layers.indexed_latent import IndexedLatentAttention
from weft.layers.kimi_delta import KimiDelta
from weft.layers.latent_attention import LatentAttention
from weft.layers.lightning_attention import LightningAttention
from weft.layers.mamba import Mamba
from weft.layers.mamba2 import Mamba2
from weft.layers.mlp import dense_mlp
from weft.layers.moe import SparseMoe
from weft.layers.moe_kinds import sparse_moe
from weft.layers.ngram import NGramEmbedding
from weft.layers.norm import ResidualRMSNorm, ResidualSum, output_norm, residual_norm
from weft.layers.relative_attention import relative_attention
from weft.layers.residual_conv import OutputConv
from weft.layers.residual_streams import GatedEnd, block_norm, end_of_streams, stream_connection
from weft.layers.rg_lru import RgLru
from weft.layers.shared_block import SharedBlock
from weft.layers.short_conv import ShortConv
from weft.layers.sliding_window import SlidingWindowAttention
from weft.layers.weight import LoadableModel
from weft.models.weight_names import weight_table

MIXERS: dict[type, Callable[[Any, ModelConfig, ModelContext, str], nn.Module]] = {
    AttentionConfig: Attention,
    SlidingWindowConfig: SlidingWindowAttention,
    LatentAttentionConfig: LatentAttention,
    IndexedAttentionConfig: IndexedAttention,
    IndexedLatentConfig: IndexedLatentAttention,
    NGramConfig: NGramEmbedding,
    SharedBlockConfig: SharedBlock,
    ConvolutionalAttentionConfig: convolutional_attention,
    GatedDeltaNetConfig: GatedDeltaNet,
    KimiDeltaConfig: KimiDelta,
    LightningAttentionConfig: LightningAttention,
    MambaConfig: Mamba,
    HeadedMambaConfig: HeadedMamba,
    Mamba2Config: Mamba2,
    ShortConvConfig: ShortConv,
    RgLruConfig: RgLru,
    RelativeAttentionConfig: relative_attention,
    OutputConvConfig: OutputConv,
    ClippedAttentionConfig: clipped_attention,
}
"""From the class of a geometry to the token mixer that is built by ``(geometry, config, context, name)`` and registers
itself in the layer table under ``name``: ``[T, hidden_size] -> [T, hidden_size]``, this rank's part of the sum."""


class LayerPlace(NamedTuple):
    """The place of a decoder layer in the model, and the parts that follow from the place.

    Attributes:
        name: name of the layer's module in the model, for example ``model.layers.3``.
        layer_type: see ``ModelConfig.layer_types``.
        sparse: whether the layer has experts instead of a dense MLP.
        partial_input: whether the layer's input is this rank's part of a sum.
    """

    name: str
    layer_type: str
    sparse: bool
    partial_input: bool = True
    has_mlp: bool = True


class DecoderLayer(nn.Module):
    """Pre-norm block: token mixers (several add up), then MLP or experts. It may have one of these halves alone.

    ``(x, residual) -> (x, residual)``: the layer's input is the sum of both, which the next norm forms. With
    ``LogitsRows``, in the last layer, caches take all rows, and only these rows ``[N, hidden_size]`` come out.

    Attributes:
        kind: layers of one kind differ in their weights only.
        partial_output: whether the returned ``x`` is this rank's part of a sum.
    """

    partial_output: ClassVar[bool] = True
    post_attention_layernorm: Any
    """The norm after the mixers, of the residual stream or of the mixers' output."""

    def __init__(self, config: ModelConfig, context: ModelContext, place: LayerPlace) -> None:
        super().__init__()
        geometries = config.mixers[place.layer_type]
        self._mixers, self._has_mlp = tuple(geometries), place.has_mlp
        self._add_norms(config, context, place.partial_input)
        for module, geometry in geometries.items():
            self.add_module(module, MIXERS[type(geometry)](geometry, config, context, f"{place.name}.{module}"))
        self.mlp: nn.Module
        if place.sparse:
            self.mlp = sparse_moe(config, context)
        elif place.has_mlp:
            self.mlp = dense_mlp(config, config.intermediate_size, context)
        self.kind = (place.layer_type, place.sparse, place.partial_input and context.tp.size > 1)

    def _add_norms(self, config: ModelConfig, context: ModelContext, partial_input: bool) -> None:
        if self._mixers:
            self.input_layernorm = residual_norm(config, context, partial=partial_input)
        if self._has_mlp:
            partial = bool(self._mixers) or partial_input
            self.post_attention_layernorm = residual_norm(config, context, partial=partial)

    def return_partial_sums(self, all_reduce: AllReduce | None) -> None:
        """Let both halves return partial sums (``RowParallelLinear.returns_partial_sums``).

        A norm of the residual stream, with ``all_reduce``, follows each half and adds them. Layers with several mixers
        add the mixers' outputs first, so these return whole sums.
        """
        halves = [getattr(self, module) for module in self._mixers if len(self._mixers) == 1]
        for half in [*halves, self.mlp] if self._has_mlp else halves:
            last = half if isinstance(half, SparseMoe) else getattr(half, "output_projection", None)
            if last is not None:
                last.return_partial_sums(all_reduce)

    def forward(self, x: Tensor, residual: Tensor | None, rows: LogitsRows | None = None) -> tuple[Tensor, Tensor]:
        if rows is None:
            return self.feed_forward(*self.mix(x, residual))
        mixed, residual = self.mix(x, residual, rows) if self._mixers else (rows.of(x, -2), residual)
        with other_batch(rows.batch):
            return self.feed_forward(mixed, rows.of(residual) if residual is not None else None)

    def mix(self, x: Tensor, residual: Tensor | None, rows: LogitsRows | None = None) -> tuple[Tensor, Tensor | None]:
        """Compute the first half: the mixers' output (of ``rows`` only, if given), and the residual of all rows."""
        if self._mixers:
            x, residual = self.input_layernorm.add(x, residual)
            x = self.mixer_output(x, rows)
        return x, residual

    def feed_forward(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Compute the second half for the given rows."""
        if self._has_mlp:
            x, residual = self.post_attention_layernorm.add(x, residual)
            x = self.mlp(x)
        assert residual is not None, "a layer has at least one half, whose norm forms the residual"
        return x, residual

    def mixer_output(self, hidden_states: Tensor, rows: LogitsRows | None) -> Tensor:
        """The token mixers' sum: ``[T, hidden_size] -> [T, hidden_size]`` or ``[N, hidden_size]``, this rank's part."""
        first, *others = (getattr(self, module) for module in self._mixers)
        mixed = _mixer_output(first, hidden_states, rows)
        for mixer in others:
            mixed = mixed + _mixer_output(mixer, hidden_states, rows)
        return mixed


def _mixer_output(mixer: nn.Module, hidden_states: Tensor, rows: LogitsRows | None) -> Tensor:
    if rows is None:
        return mixer(hidden_states)
    if isinstance(mixer, Attention):
        return mixer.forward_rows(hidden_states, rows)
    return rows.of(mixer(hidden_states), -2)


class PostNormLayer(DecoderLayer):
    """Norms follow mixer and MLP instead of preceding them (OLMo 2, arXiv 2501.00656)."""

    partial_output = False

    def _add_norms(self, config: ModelConfig, context: ModelContext, partial_input: bool) -> None:
        self._input = ResidualSum(config.hidden_size, context, partial=partial_input)
        self.post_attention_layernorm = output_norm(config, context)
        self.post_feedforward_layernorm = output_norm(config, context)

    def mix(self, x: Tensor, residual: Tensor | None, rows: LogitsRows | None = None) -> tuple[Tensor, Tensor | None]:
        residual = self._input(x, residual)
        return self.mixer_output(residual, rows), residual

    def feed_forward(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        residual = residual + self.post_attention_layernorm(x)
        return self.post_feedforward_layernorm(self.mlp(residual)), residual


class SandwichNormLayer(DecoderLayer):
    """Mixers and MLP have a norm on both sides (Gemma 2, arXiv 2408.00118)."""

    partial_output = False

    def _add_norms(self, config: ModelConfig, context: ModelContext, partial_input: bool) -> None:
        self.input_layernorm = residual_norm(config, context, partial=partial_input)
        self.post_attention_layernorm = output_norm(config, context)
        self.pre_feedforward_layernorm = residual_norm(config, context, partial=False)
        self.post_feedforward_layernorm = output_norm(config, context)

    def feed_forward(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        x = self.post_attention_layernorm(x)
        x, residual = self.pre_feedforward_layernorm.add(x, residual)
        return self.post_feedforward_layernorm(self.mlp(x)), residual


class StreamNormLayer(DecoderLayer):
    """Pre-norm, but the residual stream continues from the normalised input. Sums are weighted (MiniMax)."""

    def __init__(self, config: ModelConfig, context: ModelContext, place: LayerPlace) -> None:
        super().__init__(config, context, place)
        self._weights = config.residual_weights[place.layer_type]

    def mix(self, x: Tensor, residual: Tensor | None, rows: LogitsRows | None = None) -> tuple[Tensor, Tensor | None]:
        x, _ = self.input_layernorm.add(x, residual)
        return self.mixer_output(x, rows) * self._weights.mixer_output, x * self._weights.mixer_input

    def feed_forward(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        x, _ = self.post_attention_layernorm.add(x, residual)
        return self.mlp(x) * self._weights.mlp_output, x * self._weights.mlp_input


class StreamsLayer(DecoderLayer):
    """Pre-norm, with several residual streams (``layers/residual_streams.py``).

    The residual holds the streams ``[T, N, hidden_size]``, and x is what this layer added last. In the first layer
    every stream begins with the embeddings.
    """

    partial_output = False

    def __init__(self, config: ModelConfig, context: ModelContext, place: LayerPlace) -> None:
        super().__init__(config, context, place)
        self._mixers = tuple(name for name in self._mixers if not isinstance(getattr(self, name), NGramEmbedding))

    def _add_norms(self, config: ModelConfig, context: ModelContext, partial_input: bool) -> None:
        self.input_layernorm: nn.Module  # type: ignore[assignment]  # it adds nothing
        self.post_attention_layernorm: nn.Module
        assert config.streams is not None
        self._count = config.streams.count
        self._input = ResidualSum(config.hidden_size, context, partial=partial_input)
        self._block = ResidualSum(config.hidden_size, context, partial=True)
        self.input_layernorm, self.post_attention_layernorm = (block_norm(config, context) for _ in range(2))
        self.attn_hc, self.ffn_hc = (stream_connection(config, context) for _ in range(2))

    def begin(self, x: Tensor) -> Tensor:
        """Begin the streams with the embeddings ``[T, hidden_size]``."""
        return self._input(x, None)[:, None].expand(-1, self._count, -1)

    def forward(self, x: Tensor, residual: Tensor | None, rows: LogitsRows | None = None) -> tuple[Tensor, Tensor]:
        residual = self.begin(x) if residual is None else residual
        x, weights = self.attn_hc.read(residual)
        mixed = self._block(self.mixer_output(self.input_layernorm(x), rows), None)
        if rows is None:
            return self.feed_forward(mixed, self.attn_hc.write(residual, mixed, weights))
        residual, weights = rows.of(residual), tuple(rows.of(w) for w in weights)
        with other_batch(rows.batch):
            return self.feed_forward(mixed, self.attn_hc.write(residual, mixed, weights))

    def feed_forward(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        assert residual is not None
        x, weights = self.ffn_hc.read(residual)
        out = self._block(self.mlp(self.post_attention_layernorm(x)), None)
        return out, self.ffn_hc.write(residual, out, weights)


def final_norm(config: ModelConfig, context: ModelContext, *, partial: bool) -> ResidualRMSNorm | GatedEnd:
    """The norm after the last layer, which also ends residual streams."""
    if config.streams is not None:
        return end_of_streams(config, context)
    return residual_norm(config, context, partial=partial)


class Decoder(nn.Module):
    """``input_ids [T] int64 -> hidden_states [T, hidden_size]`` after the final norm. Only ``[N, hidden_size]`` if the
    batch has ``logits_rows``. With ``ModelConfig.returns_streams``, the residual streams side by side instead.

    Attributes:
        layer_classes: by placement of norms (``ModelConfig.norm_placement``).
    """

    layer_classes: ClassVar[dict[str, type[DecoderLayer]]] = {
        "stream": StreamNormLayer, "pre": DecoderLayer, "post": PostNormLayer, "sandwich": SandwichNormLayer,
        "streams": StreamsLayer,
    }  # fmt: skip

    def __init__(self, config: ModelConfig, context: ModelContext) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, context)
        kinds = [self.layer_classes[config.norm_placement.get(kind, "pre")] for kind in config.layer_types]
        layers = []
        for i, kind in enumerate(kinds):
            partial_input, has_mlp = i == 0 or kinds[i - 1].partial_output, i not in config.layers_without_mlp
            place = LayerPlace(layer_name(i), config.layer_types[i], config.is_sparse(i), partial_input, has_mlp)
            layers.append(kind(config, context, place))
        self.layers = nn.ModuleList(layers)
        self.norm = final_norm(config, context, partial=kinds[-1].partial_output)
        if all(type(layer) is DecoderLayer for layer in layers):
            for layer in layers:
                layer.return_partial_sums(AllReduce.over_ranks(config.hidden_size, context))
        self._returns_streams = config.returns_streams
        self._multiplier = config.multipliers.embedding / config.multipliers.residual

    def forward(self, input_ids: Tensor) -> Tensor:
        x, residual = self.embed_tokens(input_ids), None
        if self._multiplier != 1.0:
            x = x * self._multiplier
        rows, last = get_forward_context().batch.logits_rows, len(self.layers) - 1
        model_input = self.input_for_layers(input_ids, x)
        for index, layer in enumerate(self.layers):
            selected = rows if index == last else None
            x, residual = layer(*self.before_layer(index, x, residual, model_input), selected)
            residual = self.after_layer(index, residual, model_input, selected)
        if self._returns_streams:
            assert residual is not None
            return residual.flatten(1)
        return self.norm.add(x, residual)[0]

    def head_input(self, hidden_states: Tensor) -> Tensor:
        """``[N, hidden_size]`` of what ``forward`` returned for some tokens."""
        if isinstance(self.norm, GatedEnd) and self._returns_streams:
            return self.norm.end(hidden_states)
        return hidden_states

    def input_for_layers(self, input_ids: Tensor, x: Tensor) -> Tensor:
        """The part of the model's input that ``before_layer`` and ``after_layer`` get: the ids, unless overridden.

        Args:
            input_ids: ``[T]``.
            x: the embeddings ``[T, hidden_size]``, this rank's part of the sum.
        """
        return input_ids

    def before_layer(
        self, index: int, x: Tensor, residual: Tensor | None, model_input: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """The layer's input and residual."""
        return x, residual

    def after_layer(self, index: int, residual: Tensor, model_input: Tensor, rows: LogitsRows | None) -> Tensor:
        """The residual after a layer, of ``rows`` alone if there are any."""
        return residual


class CausalLM(LoadableModel):
    """A decoder with a language-model head. Everything about the batch comes from the forward context."""

    decoder: ClassVar[type[Decoder]] = Decoder

    def __init__(self, config: ModelConfig, context: ModelContext) -> None:
        super().__init__()
        self.weight_table = weight_table(config)
        self.model = self.decoder(config, context)
        tied = self.model.embed_tokens if config.tie_word_embeddings else None
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size, context, tied)
        self._multiplier, self._cap = config.multipliers.logits, config.multipliers.logits_cap

    def forward(self, input_ids: Tensor) -> Tensor:
        """``[T] int64 -> [T, output_size]``, or ``[N, output_size]`` of the batch's ``logits_rows``; rows of padding
        tokens are meaningless."""
        return self.model(input_ids)

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """``[N, output_size]``, of ``forward``, ``-> [N, vocab_size]`` in the model's dtype."""
        return self.head_logits(self.model.head_input(hidden_states))

    def head_logits(self, hidden_states: Tensor) -> Tensor:
        """``[N, hidden_size] -> [N, vocab_size]`` in the model's dtype."""
        logits = self.lm_head(hidden_states)
        if self._multiplier != 1.0:
            logits = logits * self._multiplier
        return logits if self._cap is None else torch.tanh(logits / self._cap) * self._cap
