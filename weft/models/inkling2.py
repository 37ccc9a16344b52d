"""A decoder whose layers read the residual stream of now and of before earlier blocks of layers (Inkling 2).

Job: the order of reads, convolutions and sums, and which states of the stream are kept. Does not know: caches, what a
mixer computes.
"""

from typing import Any

import torch
from torch import Tensor

from weft.config.model import ModelConfig
from weft.forward_context import LogitsRows
from weft.layers.block_residual import BlockEnd, BlockQueries, BlockRead
from weft.layers.clipped_attention import ClippedAttention
from weft.layers.context import ModelContext
from weft.layers.residual_conv import OutputConv
from weft.models.decoder import Decoder, DecoderLayer, LayerPlace
from weft.models.inkling import InklingDecoder, InklingModel, InklingVisionDecoder
from weft.models.vision_language import VisionLanguageModel


class BlockLayer(DecoderLayer):
    """Attention and experts, each behind a read of the stream and followed by a convolution of its output.

    ``(x, residual)`` is the stream ``[T, hidden_size]`` and its states before earlier blocks ``[T, B, hidden_size]``.
    The first layer of a block adds the state before it to those, and its own output begins a new stream. The last
    layer computes all rows too, as a convolution follows the experts.
    """

    partial_output = False
    self_attn: ClippedAttention
    attn_sconv: OutputConv
    mlp_sconv: OutputConv

    def __init__(self, config: ModelConfig, context: ModelContext, place: LayerPlace) -> None:
        super().__init__(config, context, place)
        assert config.streams is not None, "the family has blocks"
        index, size = int(place.name.rpartition(".")[2]), config.streams.count
        self._begins_block = index % size == 0
        self.attn_norm = BlockRead(self.self_attn.num_inputs, config, context, has_query=index > 0)
        self.mlp_norm = BlockRead(1, config, context)
        self.kind = (*self.kind, self._begins_block, -(-index // size))  # type: ignore[assignment]

    def _add_norms(self, config: ModelConfig, context: ModelContext, partial_input: bool) -> None:
        """The reads have norms."""

    def forward(self, x: Tensor, residual: Tensor | None, rows: LogitsRows | None = None) -> tuple[Tensor, Tensor]:
        mixed = self.attn_sconv(self.self_attn(self.attn_norm(residual, x)))
        stream = mixed.float()
        if self._begins_block:
            residual = x[:, None] if residual is None else torch.cat([residual, x[:, None]], dim=1)
        else:
            stream = stream + x
        assert residual is not None, "the first layer begins a block"
        out = self.mlp_sconv(self.mlp(self.mlp_norm(residual, stream)[0]))
        x = (stream + out).to(out.dtype)
        return (x, residual) if rows is None else (rows.of(x), rows.of(residual))


class BlockDecoder(InklingDecoder):
    """A decoder of such layers."""

    layer_classes = Decoder.layer_classes | {"blocks": BlockLayer}

    def __init__(self, config: ModelConfig, context: ModelContext) -> None:
        super().__init__(config, context)
        self.norm = BlockEnd(1, config, context)  # type: ignore[assignment]
        layers = dict(enumerate(self.layers))
        reads: dict[str, Any] = {f"attn_queries.{i - 1}": layer.attn_norm for i, layer in layers.items() if i}
        reads |= {f"mlp_queries.{i}": layer.mlp_norm for i, layer in layers.items()}
        self.attn_res = BlockQueries(reads | {"output_query": self.norm})


class BlockVisionDecoder(BlockDecoder, InklingVisionDecoder):
    """``BlockDecoder`` that reads images."""


class Inkling2Model(InklingModel):
    """A text model with residuals over blocks. Capped logits stay in float32, where close ones do not become equal."""

    decoder = BlockDecoder

    def _whole_logits(self, hidden_states: Tensor) -> Tensor:
        assert self._cap is not None, "the family caps logits"
        return torch.tanh(self.lm_head(hidden_states).float() / self._cap) * self._cap


class Inkling2VisionModel(Inkling2Model, VisionLanguageModel):
    """``Inkling2Model`` that reads images."""

    decoder = BlockVisionDecoder
