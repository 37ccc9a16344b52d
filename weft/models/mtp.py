"""The multi-token-prediction head (MTP) of Qwen3-Next, Qwen3.5, Qwen4-Exp, GLM-5.3 and Ling 3.0, and its drafts.

Job: at position t, predict token t + 2 from the model's hidden state (after the final norm) and token t + 1. Further
drafts read the head's own hidden states in place of the model's. Owns: the head's modules, named as published
(``mtp.fc``, ``mtp.layers.0``, ...), and the batches of later drafts. Does not know: which drafts are accepted.

The head's attention layer has its own cache in the pages of the sequence. The entry at position t comes from the hidden
state of t and token t + 1, so a step that computes tokens also fills the head's cache.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from weft.config.model import MTP_LAYER, ModelConfig
from weft.forward_context import Batch, get_forward_context, other_batch
from weft.layers.all_reduce import AllReduce
from weft.layers.context import ModelContext
from weft.layers.indexer import PlacedIndexer
from weft.layers.linear import PackedLinear, RowParallelLinear
from weft.layers.norm import RMSNorm, residual_norm
from weft.layers.residual_streams import GatedEnd
from weft.layers.weight import whole_rows
from weft.models.decoder import CausalLM, DecoderLayer, LayerPlace, StreamsLayer
from weft.ops.backend import Backend
from weft.ops.drafts import places_ahead
from weft.ops.drafts.types import PageTable


class MultiTokenPredictor(nn.Module):
    """``embedded [T, hidden_size]`` (this rank's part of the sum), ``hidden_states [T, hidden_size]`` to the hidden
    states ``[T, hidden_size]`` that the output head reads."""

    def __init__(self, config: ModelConfig, context: ModelContext) -> None:
        super().__init__()
        size, eps, centred = config.hidden_size, config.rms_norm_eps, config.zero_centered_norm
        self._rank, self._num_ranks = context.tp.rank, context.tp.size
        self.pre_fc_norm_embedding = residual_norm(config, context)
        self.pre_fc_norm_hidden = RMSNorm(size, eps, context, zero_centered=centred)
        self.fc = RowParallelLinear(2 * size, size, bias=False, context=context, what="2 * hidden_size")
        place = LayerPlace(MTP_LAYER, config.mtp_layer_type, sparse=config.moe is not None)
        layer = DecoderLayer(config, context, place)
        layer.return_partial_sums(AllReduce.over_ranks(size, context))
        self.layers = nn.ModuleList([layer])
        self.norm = residual_norm(config, context)

    def forward(self, embedded: Tensor, hidden_states: Tensor) -> Tensor:
        embedded, _ = self.pre_fc_norm_embedding.add(embedded, None)
        both = torch.cat([embedded, self.pre_fc_norm_hidden(hidden_states)], dim=-1)
        x, residual = self.layers[0](self.fc(both.chunk(self._num_ranks, dim=-1)[self._rank]), None)
        return self.norm.add(x, residual)[0]

    def head_input(self, hidden_states: Tensor) -> Tensor:
        """``[N, hidden_size]`` for the output head, of what ``forward`` returned for some tokens."""
        return hidden_states


class StreamsPredictor(nn.Module):
    """The head of a model with residual streams (Qwen4-Exp): ``embedded [T, hidden_size]`` (this rank's part of the
    sum), the model's streams ``[T, count * hidden_size]`` to the head's own streams.

    One norm covers all streams of a token. One matrix multiplies each stream, and the embedding is added to each. The
    layer has no embeddings of n-grams. The head has a connection of its own for the end of its streams (vLLM's
    ``qwen4_exp`` and SGLang's ``qwen4_exp_mtp``; transformers skips these tensors).
    """

    def __init__(self, config: ModelConfig, context: ModelContext) -> None:
        super().__init__()
        assert config.streams is not None
        size, self._count = config.hidden_size, config.streams.count
        self.pre_fc_norm_embedding = residual_norm(config, context)
        self.pre_fc_norm_hidden = RMSNorm(
            size * self._count, config.rms_norm_eps, context, zero_centered=config.zero_centered_norm
        )
        self.fc_embedding, self.fc_hidden = (
            PackedLinear(size, {"": whole_rows(size)}, bias=False, context=context) for _ in range(2)
        )
        place = LayerPlace(MTP_LAYER, config.mtp_layer_type, sparse=config.moe is not None)
        self.layers = nn.ModuleList([StreamsLayer(config, context, place)])
        for module in self.modules():
            if isinstance(module, PlacedIndexer):
                module.begins_pass = True
        self.norm = GatedEnd(config.streams, config, context, writes=False)

    def forward(self, embedded: Tensor, hidden_states: Tensor) -> Tensor:
        embedded, _ = self.pre_fc_norm_embedding.add(embedded, None)
        streams = self.fc_hidden(self.pre_fc_norm_hidden(hidden_states).view(len(embedded) * self._count, -1))
        added = self.fc_embedding(embedded)
        streams = streams.view(len(embedded), self._count, -1) + added[:, None]
        return self.layers[0](added, streams)[1].flatten(1)

    def head_input(self, hidden_states: Tensor) -> Tensor:
        """Return the input of the output head, like ``MultiTokenPredictor.head_input``."""
        return self.norm.end(hidden_states)


@dataclass(frozen=True, slots=True)
class DraftInputs:
    """A step's results for the drafts that follow. T, S: tokens and sequences of its batch, padding included.

    Attributes:
        hidden_states: ``[T, output_size]``, what the model returned for the batch.
        next_ids: ``[T]`` int64, the token after each: the prompt's next one, or what was sampled; anything where a
            draft was rejected, and for padding.
        last: ``[N]`` int64, index of the last accepted token of every sequence that gets drafts; None: each of the T
            tokens is one.
        sequences: ``[N]`` int64, these sequences' rows of the batch; None: all, in order.
        batch: of the step.
    """

    hidden_states: Tensor
    next_ids: Tensor
    last: Tensor | None
    sequences: Tensor | None
    batch: Batch


class MtpDrafter:
    """Greedy drafts by the model's head. Device work only.

    Args:
        model: has a head (``ModelConfig.runs_mtp``).
        max_model_len: length of the rotary tables; drafts beyond it are meaningless.
    """

    _paged = f"{MTP_LAYER}.self_attn"
    """A layer whose first cache tensor has pages."""

    def __init__(self, model: CausalLM, max_model_len: int, backend: Backend) -> None:
        self._model, self._max_model_len, self._backend = model, max_model_len, backend
        self._head: Any = model.get_submodule("mtp")
        embedding = model.model.embed_tokens
        self._last_id = embedding.vocab_size + len(embedding.media_rows) - 1

    def draft(self, inputs: DraftInputs, num_drafts: int) -> Tensor:
        """``[N, num_drafts]`` int64, within the forward context of the step. The pages of each sequence reach
        ``num_drafts - 1`` tokens past the last accepted one; entries there are overwritten by later steps."""
        # Where kernels are compiled and not run, at start, or a row is NaN, what was sampled may be no token.
        next_ids = inputs.next_ids.clamp(0, self._last_id)
        hidden = self._predict(next_ids, inputs.hidden_states)
        if inputs.last is not None:
            hidden = hidden[inputs.last]
        count = len(hidden)
        if not (count and num_drafts):  # the cache of the head is filled, and that is all
            return next_ids.new_empty(count, num_drafts)
        drafts = [self._best(hidden)]
        for batch in self._batches_ahead(inputs, num_drafts - 1):
            with other_batch(batch):
                hidden = self._predict(drafts[-1], hidden)
            drafts.append(self._best(hidden))
        return torch.stack(drafts, dim=1)

    def _predict(self, next_ids: Tensor, hidden_states: Tensor) -> Tensor:
        hidden: Tensor = self._head(self._model.model.embed_tokens(next_ids), hidden_states)
        return hidden

    def _best(self, hidden: Tensor) -> Tensor:
        return self._model.head_logits(self._head.head_input(hidden)).argmax(dim=-1)

    def _batches_ahead(self, inputs: DraftInputs, num_ahead: int) -> Iterator[Batch]:
        """One token per sequence, 1, 2, … ``num_ahead`` tokens past its last accepted one."""
        if not num_ahead:
            return
        batch, sequences, last = inputs.batch, inputs.sequences, inputs.last
        ends, seq_lens, page_table, slots = batch.cu_seqlens_q[1:], batch.seq_lens, batch.page_table, batch.state_slots
        if sequences is not None:
            ends, seq_lens, page_table, slots = (t[sequences] for t in (ends, seq_lens, page_table, slots))
        count = len(seq_lens)
        decodes = torch.arange(count + 1, dtype=torch.int32, device=ends.device)
        page_size = next(iter(get_forward_context().caches[self._paged].values())).shape[1]
        longest = min(self._max_model_len, page_table.shape[1] * page_size)
        places = places_ahead(
            last if last is not None else decodes[:-1].long(),
            ends,
            batch.positions,
            seq_lens,
            PageTable(page_table, page_size),
            num_ahead,
            longest,
            backend=self._backend,
        )
        like = replace(
            batch,
            num_tokens=count,
            num_seqs=count,
            num_decodes=count,
            max_query_len=1,
            cu_seqlens_q=decodes,
            page_table=page_table,
            state_slots=slots,
            chunks=None,
            token_count=None if batch.token_count is None else batch.token_count // _query_len(batch),
            mixed=None,
            verification=None,
        )
        for i, (positions, slot_mapping, lengths) in enumerate(zip(*places, strict=True)):
            yield replace(
                like,
                max_seq_len=min(batch.max_seq_len + 1 + i, longest),
                positions=positions,
                slot_mapping=slot_mapping,
                seq_lens=lengths,
            )


def _query_len(batch: Batch) -> int:
    """Tokens of each sequence in a captured graph that serves any number of sequences."""
    return 1 if batch.verification is None else batch.verification.query_len
