"""A multi-token-prediction head with a layer for each draft (Inkling), and its drafts.

Job: layer i reads the output of layer i - 1 and the embedding of a later token, as layer 0 reads the hidden state of
the model. Owns: the head's modules, named as published (``mtp.layers.3.input_proj``, ...). Does not know: which drafts
are accepted.

Published implementations count positions by hidden states: at position p, layer i reads token p + 1 + i. Here that row
of layer i has position p + i. So the rows of position t read token t + 1 in every layer, and no row of a step needs a
draft. Accepted tokens have the right entries in every cache. Layer i reads the output of layer i - 1 at the position
before its own. A state of one vector keeps that output between steps. Layer i has no rows before position i.

Later drafts change windows and convolutions after the accepted tokens. These entries are copied before, and restored
afterwards.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from weft.config.layer_spec import CacheDtypes
from weft.config.model import ModelConfig, mtp_block_name, mtp_delay_name
from weft.forward_context import get_forward_context, other_batch
from weft.layers.context import ModelContext
from weft.layers.linear import RowParallelLinear
from weft.layers.norm import ResidualSum, RMSNorm
from weft.layers.short_conv import convolve_rows
from weft.models.decoder import CausalLM, LayerPlace
from weft.models.inkling import ConvolvedLayer
from weft.models.mtp import DraftInputs, MtpDrafter
from weft.ops.attention import as_bytes
from weft.ops.backend import Backend


class Delay(nn.Module):
    """``[T, hidden_size]`` to the rows of the tokens before: a convolution with a single tap. A sequence begins with
    zeros."""

    taps: Tensor

    def __init__(self, name: str, size: int, context: ModelContext) -> None:
        super().__init__()
        self.name, self._backend = name, context.backend
        taps = torch.zeros(size, 2, dtype=context.dtype, device=context.device)
        taps[:, 0] = 1.0
        self.register_buffer("taps", taps, persistent=False)
        context.layers.register(name, self)

    def forward(self, x: Tensor) -> Tensor:
        state = get_forward_context().caches[self.name]["conv"]
        return convolve_rows(x, self.taps, None, state, silu=False, backend=self._backend)


class PredictionLayer(nn.Module):
    """``embedded [T, hidden_size]`` and ``hidden_states [T, hidden_size]``, both whole on every rank, to the output
    ``[T, hidden_size]``, whole too. The output head and the next layer read it without a norm."""

    def __init__(self, index: int, config: ModelConfig, context: ModelContext) -> None:
        super().__init__()
        size, self._index = config.hidden_size, index
        self._rank, self._num_ranks = context.tp.rank, context.tp.size
        self.hidden_norm, self.embed_norm = (
            RMSNorm(size, config.rms_norm_eps, context, zero_centered=config.zero_centered_norm) for _ in range(2)
        )
        self.input_proj = RowParallelLinear(2 * size, size, bias=False, context=context, what="2 * hidden_size")
        self._input = ResidualSum(size, context, partial=True)
        place = LayerPlace(mtp_block_name(index), config.mtp_chain[index], sparse=False, partial_input=False)
        self.transformer_block = ConvolvedLayer(config, context, place)
        attention: Any = self.transformer_block.self_attn
        attention.first_row = index
        self.delay = Delay(mtp_delay_name(index), size, context) if index else nn.Identity()

    def forward(self, embedded: Tensor, hidden_states: Tensor) -> Tensor:
        both = torch.cat([self.hidden_norm(hidden_states), self.embed_norm(embedded)], dim=-1)
        x = self._input(self.input_proj(both.chunk(self._num_ranks, dim=-1)[self._rank]), None)
        if self._index:  # zeros stay zeros in every part of the layer
            x = x.masked_fill((get_forward_context().batch.positions < self._index)[:, None], 0.0)
        x, residual = self.transformer_block(x, None)
        return x + residual


class ChainedPredictor(nn.Module):
    """The layers of the head that run, and the names of the states that drafts change.

    Attributes:
        states: the states of each layer besides the delay, as pairs of the names of cache and tensor.
        paged: a layer of the model whose first cache tensor has pages.
    """

    def __init__(self, config: ModelConfig, context: ModelContext) -> None:
        super().__init__()
        self.layers = nn.ModuleList(PredictionLayer(index, config, context) for index in range(config.mtp_depth))
        specs = config.layer_specs(CacheDtypes())
        self.paged = next(name for name, spec in specs.items() if spec.paged)
        self.states = [
            [(name, state.name) for name in specs if name.startswith(f"{block}.") for state in specs[name].states]
            for block in config.head_layers
        ]

    def forward(self, embedded: Tensor, hidden_states: Tensor) -> list[Tensor]:
        """Run every layer over a step's tokens.

        Args:
            embedded: ``[T, hidden_size]`` of the next tokens.
            hidden_states: ``[T, hidden_size]`` of the model.

        Returns:
            ``[T, hidden_size]`` of each layer.
        """
        outputs = [hidden_states]
        for layer in self.layers:
            assert isinstance(layer, PredictionLayer)
            outputs.append(layer(embedded, layer.delay(outputs[-1])))
        return outputs[1:]

    def head_input(self, hidden_states: Tensor) -> Tensor:
        """Return the input of the output head, like ``MultiTokenPredictor.head_input``."""
        return hidden_states


class ChainDrafter(MtpDrafter):
    """Greedy drafts, each by a layer of its own. Arguments as for ``MtpDrafter``."""

    def __init__(self, model: CausalLM, max_model_len: int, backend: Backend) -> None:
        super().__init__(model, max_model_len, backend)
        self._decoder: Any = model.model
        self._paged = self._head.paged

    def draft(self, inputs: DraftInputs, num_drafts: int) -> Tensor:
        next_ids = inputs.next_ids.clamp(0, self._last_id)
        outputs = self._head(self._decoder.embedded(next_ids), inputs.hidden_states)
        if inputs.last is not None:
            outputs = [hidden[inputs.last] for hidden in outputs]
        count = len(outputs[0])
        if not (count and num_drafts):
            return next_ids.new_empty(count, num_drafts)
        drafts, slots = [self._best(outputs[0])], _slots_after(inputs)
        batches = [replace(batch, state_slots=slots) for batch in self._batches_ahead(inputs, num_drafts - 1)]
        with self._states_kept(slots, [batch.positions for batch in batches]):
            for first, batch in enumerate(batches, 1):
                with other_batch(batch):
                    outputs = self._one_token_further(outputs, drafts[-1], range(first, num_drafts))
                drafts.append(self._best(outputs[first]))
        return torch.stack(drafts, dim=1)

    def _one_token_further(self, before: list[Tensor], ids: Tensor, layers: range) -> list[Tensor]:
        """Run ``layers`` over one more token of every sequence, whose draft is known: ``ids [N]``.

        Args:
            before: for each layer, its output ``[N, hidden_size]`` for the token before.
        """
        embedded, after = self._decoder.embedded(ids), list(before)
        for index in layers:
            after[index] = self._head.layers[index](embedded, before[index - 1])
        return after

    @contextmanager
    def _states_kept(self, slots: Tensor, positions: Sequence[Tensor]) -> Iterator[None]:
        """Keep the states of the layers that make later drafts as they are, while these run.

        Args:
            slots: ``[N]`` int32.
            positions: ``[N]`` int64 of each pass.
        """
        kept: list[tuple[Tensor, tuple[Tensor, ...], Tensor]] = []
        caches, rows = get_forward_context().caches, slots.long()
        for layer, name in (state for states in self._head.states[1 : 1 + len(positions)] for state in states):
            tensor = as_bytes(caches[layer][name])
            places: tuple[Tensor, ...] = (rows,)
            if name != "conv":  # a window, of which a token takes one entry
                places = rows[:, None], torch.stack(list(positions), dim=1) % tensor.shape[1]
            kept.append((tensor, places, tensor[places]))
        yield
        for tensor, places, values in kept:
            tensor[places] = values


def _slots_after(inputs: DraftInputs) -> Tensor:
    """The slots ``[N]`` int32 of the states after each sequence's last accepted token."""
    batch, last, slots = inputs.batch, inputs.last, inputs.batch.state_slots
    if last is None:
        return slots
    if batch.verification is not None:
        return batch.verification.slots.flatten()[last]
    if inputs.sequences is not None:
        slots = slots[inputs.sequences]
    if batch.chunks is None:
        return slots
    chunks = batch.chunks
    ends_there = (chunks.start + chunks.length)[None] == last[:, None] + 1
    stored = torch.where(ends_there, chunks.checkpoint_slot, 0).amax(1)
    return torch.where(stored > 0, stored, slots)
