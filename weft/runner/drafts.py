"""Drafters: after a step, drafts for the next one, on the device.

Job: ``make_drafter`` chooses one of two. ``MtpStepDrafter`` runs the model's head over a step's hidden states and the
token after each position. All tokens of the step go through the head, so that its cache is complete.
``NgramDrafter`` keeps the tokens of every row on the device and looks for earlier occurrences of the last ones. Does
not know: how the head drafts (``models/mtp.py``), how a match is found (``ops/drafts``), which requests get drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import msgspec
import torch
from torch import Tensor

from weft.config import EngineConfig
from weft.config.speculation import SpeculativeConfig
from weft.forward_context import Batch, ForwardContext, forward_context
from weft.graph.batch_descriptor import BatchDescriptor
from weft.messages import NewRequest, ScheduledRequest
from weft.models.decoder import CausalLM
from weft.models.mtp import DraftInputs, MtpDrafter
from weft.ops.backend import Backend
from weft.ops.drafts import NgramRule, ngram_drafts
from weft.runner.batch_builder import BatchBuilder
from weft.runner.buffers import device_ints, to_device
from weft.runner.rows import RowTable
from weft.runner.step_inputs import StepInputs
from weft.runner.step_layout import LayoutRules
from weft.speculation.acceptance import Acceptance


@dataclass(frozen=True, slots=True)
class RunStep:
    """A step of any kind after its forward pass, as drafters read it.

    Attributes:
        requests: the step's requests.
        shape: the step's real sizes.
        hidden_states: ``[T, hidden_size]``, the output of the model.
        token_ids: ``[M]`` int64, sampled at the positions of the requests that sample; None if nothing was sampled.
        acceptance: the acceptance of the drafts that the step verified; None if there were none.
    """

    requests: Sequence[ScheduledRequest]
    shape: BatchDescriptor
    hidden_states: Tensor
    token_ids: Tensor | None
    acceptance: Acceptance | None


class Drafter(Protocol):
    """Makes drafts for the next step of every sequence, on the device."""

    @property
    def static_memory(self) -> dict[str, Tensor]:
        """Return the tensors that captured drafting reads, by name."""
        ...

    def add_row(self, new: NewRequest) -> None:
        """Start the state of a new request's row."""
        ...

    def after_step(self, step: RunStep) -> Tensor:
        """Return drafts ``[N, K]`` int64 for the step's N requests that sampled."""
        ...

    def after_full_step(
        self, inputs: StepInputs, hidden_states: Tensor, token_ids: Tensor, acceptance: Acceptance | None
    ) -> Tensor:
        """Return the same for a step in which every sequence decodes, or verifies equally many drafts.

        This is device work only, with nothing from the host, so that a graph holds it. If the step verified drafts, the
        rows remember the new ones.

        Args:
            inputs: inputs of the step.
            hidden_states: ``[T, hidden_size]``.
            token_ids: ``[T]`` int64, sampled after each position.
            acceptance: None if every sequence decodes.
        """
        ...


_SAMPLED = -1
"""Stands for the token that the step samples."""


@dataclass(frozen=True, slots=True)
class MtpStepDrafter:
    """Drafts by the model's own head (MTP).

    Attributes:
        context: from a batch to its forward context.
        reach: tokens past the last one of a step that the head reads and writes.
    """

    drafter: MtpDrafter
    builder: BatchBuilder
    rows: RowTable
    context: Callable[[Batch], ForwardContext]
    reach: int

    @property
    def static_memory(self) -> dict[str, Tensor]:
        return {}

    def add_row(self, new: NewRequest) -> None:
        """Do nothing: the head's state of a sequence is in its pages."""

    def after_step(self, step: RunStep) -> Tensor:
        longest = min(step.shape.max_seq_len + self.reach, self.rows.max_pages * self.builder.page_size)
        inputs = self.builder.materialise(msgspec.structs.replace(step.shape, max_seq_len=longest))
        sampling = self._ints([i for i, request in enumerate(step.requests) if request.samples])
        last = self._last(step.requests, sampling, step.acceptance)
        next_ids = inputs.input_ids.roll(-1).index_copy_(0, last, self._ids_after(step.requests))
        with forward_context(self.context(inputs.batch)):
            drafts = DraftInputs(step.hidden_states, next_ids, last[sampling], sampling, inputs.batch)
            return self.drafter.draft(drafts, self.builder.rules.num_drafts_at(len(sampling)))

    def after_full_step(
        self, inputs: StepInputs, hidden_states: Tensor, token_ids: Tensor, acceptance: Acceptance | None
    ) -> Tensor:
        last = acceptance.last if acceptance is not None else None
        with forward_context(self.context(inputs.batch)):
            drafts = DraftInputs(hidden_states, token_ids, last, None, inputs.batch)
            found = self.drafter.draft(drafts, self.builder.rules.num_drafts_at(inputs.batch.num_seqs))
        if acceptance is not None:
            self.rows.set_drafts(inputs.rows, found)
        return found

    def _last(self, requests: Sequence[ScheduledRequest], sampling: Tensor, acceptance: Acceptance | None) -> Tensor:
        """``[S]``: index of each request's last token that is no draft, or an accepted one."""
        ends = accumulate(request.num_tokens for request in requests)
        last = self._ints([end - 1 - len(r.draft_token_ids) for end, r in zip(ends, requests, strict=True)])
        if acceptance is None:
            return last
        return last.index_add_(0, sampling, acceptance.num_accepted)

    def _ids_after(self, requests: Sequence[ScheduledRequest]) -> Tensor:
        """``[S]``: the token after each request's last one: the prompt's, or the one sampled last."""
        known = []
        for request in requests:
            end = request.start + request.num_tokens
            following = self.rows.known_tokens(request.row, end, end + 1)
            known.append(_SAMPLED if request.samples else int(following[0]) if len(following) else 0)
        after = self._ints(known)
        sampled = self.rows.last_token.index_select(0, self._ints([request.row for request in requests]))
        return torch.where(after == _SAMPLED, sampled, after)

    def _ints(self, values: list[int]) -> Tensor:
        return device_ints(values, self.rows.last_token.device)


class NgramDrafter:
    """Drafts by prompt lookup.

    Args:
        config: what to look up.
        max_model_len: most tokens of a sequence.

    Attributes:
        history: ``[num_rows + 1, L]`` int32, the tokens of every row from the start of its prompt.
    """

    def __init__(
        self, config: SpeculativeConfig, rules: LayoutRules, rows: RowTable, max_model_len: int, backend: Backend
    ) -> None:
        self._config, self._rules, self._rows, self._backend = config, rules, rows, backend
        # A step may sample that many tokens past the longest sequence, which are written and do not count.
        width = max_model_len + 1 + config.num_speculative_tokens
        device = rows.last_token.device
        self.history = torch.zeros(rows.padding_row + 1, width, dtype=torch.int32, device=device)

    @property
    def static_memory(self) -> dict[str, Tensor]:
        return {"history": self.history}

    def add_row(self, new: NewRequest) -> None:
        """Copy the request's tokens, which the table of rows has by now, to its row of the history."""
        tokens = torch.from_numpy(self._rows.known_tokens(new.row, 0, len(new.token_ids)))
        self.history[new.row, : len(tokens)].copy_(to_device(tokens, self.history.device))

    def after_step(self, step: RunStep) -> Tensor:
        """Return drafts. Requests with fewer drafts than others are filled up after their tokens."""
        sampling = [request for request in step.requests if request.samples]
        if step.token_ids is None:
            return self._rows.last_token.new_empty(0, 0)
        counts = [request.num_samples for request in sampling]
        starts, query_len = accumulate(counts[:-1], initial=0), max(counts)
        places = [[start + min(i, n - 1) for i in range(query_len)] for start, n in zip(starts, counts, strict=True)]
        lengths = [r.start + r.num_tokens - len(r.draft_token_ids) + query_len - 1 for r in sampling]
        seq_lens = self._ints(lengths).to(torch.int32)
        padded = step.token_ids.index_select(0, self._ints([place for row in places for place in row]))
        return self._draft(padded, step.acceptance, self._ints([r.row for r in sampling]), seq_lens)

    def after_full_step(
        self, inputs: StepInputs, hidden_states: Tensor, token_ids: Tensor, acceptance: Acceptance | None
    ) -> Tensor:
        return self._draft(token_ids, acceptance, inputs.rows, inputs.batch.seq_lens)

    def _draft(self, token_ids: Tensor, acceptance: Acceptance | None, rows: Tensor, seq_lens: Tensor) -> Tensor:
        config, num_drafts = self._config, self._rules.num_drafts_at(len(rows))
        always = config.synthetic_acceptance_rate is not None
        rule = NgramRule(num_drafts, config.prompt_lookup_min, config.prompt_lookup_max, always)
        num_accepted = acceptance.num_accepted if acceptance is not None else None
        return ngram_drafts(
            token_ids, num_accepted, rows, seq_lens, self.history, self._rows.state, rule, backend=self._backend
        )

    def _ints(self, values: list[int]) -> Tensor:
        return device_ints(values, self.history.device)


def make_drafter(
    config: EngineConfig,
    model: CausalLM,
    builder: BatchBuilder,
    rows: RowTable,
    context: Callable[[Batch], ForwardContext],
    max_model_len: int,
    backend: Backend,
) -> Drafter | None:
    """Return what makes drafts for the next step on the device; None if the engine drafts nothing there."""
    if config.model_config.runs_mtp:
        drafter = MtpDrafter(model, max_model_len, backend)
        return MtpStepDrafter(drafter, builder, rows, context, reach=config.num_drafts - 1)
    if config.speculative_config is not None:
        return NgramDrafter(config.speculative_config, builder.rules, rows, max_model_len, backend)
    return None
