"""Drafters: after a step, drafts for the next one, on the device.

Job: ``make_drafts`` chooses one of two. ``MtpDrafts`` runs the model's head over a step's hidden states and the token
after each position. All tokens of the step go through the head, so that its cache is complete. ``NgramDrafts`` keeps
the tokens of every row on the device and looks for earlier occurrences of the last ones. Does not know: how the head
drafts (``models/mtp.py``, ``models/mtp_chain.py``), how a match is found (``ops/drafts``), which requests get drafts.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor

from weft.config import EngineConfig
from weft.config.speculation import SpeculativeConfig
from weft.forward_context import Batch, ForwardContext, forward_context
from weft.messages import NewRequest, ScheduledRequest
from weft.models.decoder import CausalLM
from weft.models.mtp import DraftInputs, MtpDrafter
from weft.models.mtp_chain import ChainDrafter
from weft.ops.backend import Backend
from weft.ops.drafts import NgramRule, ngram_drafts
from weft.runner.buffers import to_device
from weft.runner.drafting.acceptance import Acceptance
from weft.runner.drafting.step_drafts import DraftRules, RunStep, StepDrafts
from weft.runner.rows import RowTable
from weft.runner.step_inputs import StepInputs

_SAMPLED = -1
"""Stands for the token that the step samples."""


class MtpDrafts(StepDrafts):
    """Drafts by the model's own head (MTP), whose state of a sequence is in its pages.

    Args:
        context: from a batch to its forward context.
        base: arguments of ``StepDrafts``.
    """

    def __init__(self, drafter: MtpDrafter, context: Callable[[Batch], ForwardContext], *base: Any) -> None:
        super().__init__(*base)
        self._drafter, self._context = drafter, context

    def after_step(self, step: RunStep) -> Tensor:
        ahead = self.rules.most - 1  # tokens past the last one of a step that the head reads and writes
        longest = min(step.shape.max_seq_len + ahead, self._rows.max_pages * self._page_size)
        inputs = step.inputs_for(replace(step.shape, max_seq_len=longest))
        sampling = self._ints([i for i, request in enumerate(step.requests) if request.samples])
        last = self._last(step.requests, sampling, step.acceptance)
        next_ids = inputs.input_ids.roll(-1).index_copy_(0, last, self._ids_after(step.requests))
        with forward_context(self._context(inputs.batch)):
            drafts = DraftInputs(step.hidden_states, next_ids, last[sampling], sampling, inputs.batch)
            return self._drafter.draft(drafts, self.rules.at(len(sampling)))

    def after_full_step(
        self, inputs: StepInputs, hidden_states: Tensor, token_ids: Tensor, acceptance: Acceptance | None
    ) -> Tensor:
        last = acceptance.last if acceptance is not None else None
        with forward_context(self._context(inputs.batch)):
            drafts = DraftInputs(hidden_states, token_ids, last, None, inputs.batch)
            found = self._drafter.draft(drafts, self.rules.at(inputs.batch.num_seqs))
        if acceptance is not None and self.rules.on_device:
            self.state.drafts[:, : found.shape[1]].index_copy_(0, inputs.rows, found)
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
            following = self._rows.known_tokens(request.row, end, end + 1)
            known.append(_SAMPLED if request.samples else int(following[0]) if len(following) else 0)
        after = self._ints(known)
        sampled = self.state.last_token.index_select(0, self._ints([request.row for request in requests]))
        return torch.where(after == _SAMPLED, sampled, after)


class NgramDrafts(StepDrafts):
    """Drafts by prompt lookup.

    Args:
        config: what to look up.
        max_model_len: most tokens of a sequence.
        base: arguments of ``StepDrafts``.

    Attributes:
        history: ``[num_rows + 1, L]`` int32, the tokens of every row from the start of its prompt.
    """

    def __init__(self, config: SpeculativeConfig, max_model_len: int, *base: Any) -> None:
        super().__init__(*base)
        self._config = config
        # A step may sample that many tokens past the longest sequence, which are written and do not count.
        width = max_model_len + 1 + config.num_speculative_tokens
        self.history = self.state.last_token.new_zeros(len(self.state.last_token), width, dtype=torch.int32)

    @property
    def static_memory(self) -> dict[str, Tensor]:
        return super().static_memory | {"history": self.history}

    def add_row(self, new: NewRequest) -> None:
        """Copy the request's tokens, which the table of rows has by now, to its row of the history."""
        tokens = torch.from_numpy(self._rows.known_tokens(new.row, 0, len(new.token_ids)))
        self.history[new.row, : len(tokens)].copy_(to_device(tokens, self.history.device))

    def after_step(self, step: RunStep) -> Tensor:
        """Return drafts. Requests with fewer drafts than others are filled up after their tokens."""
        sampling = [request for request in step.requests if request.samples]
        if step.token_ids is None:
            return self.state.last_token.new_empty(0, 0)
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
        config, num_drafts = self._config, self.rules.at(len(rows))
        always = config.synthetic_acceptance_rate is not None
        rule = NgramRule(num_drafts, config.prompt_lookup_min, config.prompt_lookup_max, always)
        num_accepted = acceptance.num_accepted if acceptance is not None else None
        return ngram_drafts(
            token_ids, num_accepted, rows, seq_lens, self.history, self.state, rule, backend=self._backend
        )


def make_drafts(
    config: EngineConfig,
    model: CausalLM,
    rows: RowTable,
    context: Callable[[Batch], ForwardContext],
    max_model_len: int,
    backend: Backend,
) -> StepDrafts | None:
    """Return the drafts of a runner's steps; None if the engine drafts nothing."""
    rules, speculation = DraftRules.of(config), config.speculative_config
    if rules is None or speculation is None:
        return None
    never = config.eos_token_ids if rules.on_device else ()
    base = rules, rows, config.page_size, backend, never, speculation.synthetic_acceptance_rate
    if config.model_config.runs_mtp:
        drafter = ChainDrafter if config.model_config.mtp_chain else MtpDrafter
        return MtpDrafts(drafter(model, max_model_len, backend), context, *base)
    return NgramDrafts(speculation, max_model_len, *base)
