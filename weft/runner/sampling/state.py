"""From rows to what the sampler needs.

Job: gather the sampling parameters of the rows that sample in a step, and keep the histories that some of them need
(token counts for penalties, recent tokens for bad words). Owns: those histories, on the device, so that a sampled token
need not visit the host. Does not know: logits, or how a token is chosen. A row that asks for nothing costs nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.layers.sampler import BlockedTokens, LogitBias, LogitsProcessor, Penalties, SamplingMetadata
from weft.messages import NewRequest, RowSampling, ScheduledRequest
from weft.ops.sampling import filter_candidates
from weft.runner.buffers import device_ints, to_device
from weft.runner.rows import RowTable
from weft.runner.step_inputs import SamplingTensors

NO_TOKEN = -1
"""Stands in a token history where there is no token, and in a bad word's prefix where any token will do."""


@dataclass(slots=True)
class Counts:
    """``output [V]`` int32, how often each token was generated; ``prompt [V]`` bool, whether the prompt has it."""

    output: Tensor
    prompt: Tensor


@dataclass(slots=True)
class BadWords:
    """Bad words of one row, right-aligned.

    Attributes:
        prefixes: ``[B, L]`` int64, all but the last token of each; ``NO_TOKEN`` on the left where a word is shorter.
        last: ``[B]`` int64, the last tokens: blocked while the row's latest tokens equal the prefix.
        recent: ``[L]`` int64, the row's latest generated tokens.
    """

    prefixes: Tensor
    last: Tensor
    recent: Tensor

    def after(self, token_ids: Tensor) -> BadWords:
        return BadWords(self.prefixes, self.last, torch.cat([self.recent, token_ids])[len(token_ids) :])

    def blocked(self) -> Tensor:
        """Return ``[B]`` bool: True for those of ``last`` that must not be sampled next."""
        return ((self.prefixes == self.recent) | (self.prefixes == NO_TOKEN)).all(-1)


@dataclass(frozen=True, slots=True)
class StepEdits:
    """Edits of single rows for one step.

    Attributes:
        masks: row -> ``[V]`` bool masks of allowed tokens, for the next token and after each of the step's drafts.
        processors: row -> logits processor.
    """

    masks: Mapping[int, Sequence[Tensor]]
    processors: Mapping[int, LogitsProcessor]


NO_EDITS = StepEdits({}, {})


class SamplingState:
    """The sampling parameters and histories of one runner's rows; makes ``SamplingMetadata`` of them."""

    def __init__(self, rows: RowTable, vocab_size: int, device: torch.device) -> None:
        self._rows = rows
        self._vocab_size = vocab_size
        self._device = device
        self._counts: dict[int, Counts] = {}
        self._bad_words: dict[int, BadWords] = {}
        self._allowed: dict[int, Tensor] = {}
        self._biases: dict[int, tuple[Tensor, Tensor]] = {}  # token ids and values
        self._ends: dict[int, Tensor] = {}  # ids that may not be sampled before min_tokens
        self._editing: set[int] = set()
        self._num_logprobs: dict[int, int] = {}

    def add_row(self, new: NewRequest) -> None:
        """Start the histories that the new request of a row needs."""
        self.free_row(new.row)
        params = new.sampling
        output = new.token_ids[new.num_prompt_tokens :].tolist()
        if params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0:
            self._counts[new.row] = self._start_counts(new.token_ids[: new.num_prompt_tokens].tolist(), output)
        if params.bad_words:
            self._bad_words[new.row] = self._start_bad_words(params.bad_words, output)
        if params.allowed_token_ids is not None:
            allowed = torch.zeros(self._vocab_size, dtype=torch.bool)
            allowed[params.allowed_token_ids] = True
            self._allowed[new.row] = to_device(allowed, self._device)
        if params.logit_bias:
            tokens, values = list(params.logit_bias), list(params.logit_bias.values())
            self._biases[new.row] = self._ints(tokens), self._floats(values)
        if params.min_tokens and params.blocked_before_min:
            self._ends[new.row] = self._ints(params.blocked_before_min)
        if params.edits_logits:
            self._editing.add(new.row)
        if params.logprobs is not None:
            self._num_logprobs[new.row] = params.logprobs

    def step_edits(self, masks: Mapping[int, list[bytes]], processors: Mapping[int, LogitsProcessor]) -> StepEdits:
        """Unpack one step's masks (``SchedulerOutput.token_masks``) to the device."""
        unpacked = {row: [self._unpacked(bits) for bits in all_bits] for row, all_bits in masks.items()}
        return StepEdits(unpacked, processors)

    def _unpacked(self, bits: bytes) -> Tensor:
        """``[V]`` bool from packed bits."""
        packed = torch.frombuffer(bytearray(bits), dtype=torch.uint8).to(self._device)
        shifts = torch.arange(8, dtype=torch.uint8, device=self._device)
        return (packed[:, None] >> shifts & 1).bool().flatten()[: self._vocab_size]

    def free_row(self, row: int) -> None:
        for table in (self._counts, self._bad_words, self._allowed, self._biases, self._ends, self._num_logprobs):
            table.pop(row, None)
        self._editing.discard(row)

    def _start_counts(self, prompt: list[int], output: list[int]) -> Counts:
        mask = torch.zeros(self._vocab_size, dtype=torch.bool)
        mask[prompt] = True
        counts = torch.bincount(torch.tensor(output, dtype=torch.int64), minlength=self._vocab_size)
        return Counts(to_device(counts.to(torch.int32), self._device), to_device(mask, self._device))

    def _start_bad_words(self, words: list[list[int]], output: list[int]) -> BadWords:
        width = max(1, max(len(w) for w in words) - 1)
        prefixes = [[NO_TOKEN] * (width - len(w) + 1) + w[:-1] for w in words]
        recent = ([NO_TOKEN] * width + output)[-width:]
        # A history's NO_TOKEN must not equal a token of a prefix; a prefix's NO_TOKEN equals everything.
        return BadWords(
            to_device(torch.tensor(prefixes), self._device),
            self._ints([w[-1] for w in words]),
            self._ints(recent),
        )

    def record(self, sampled: Sequence[ScheduledRequest], token_ids: Tensor, counted: Tensor | None = None) -> None:
        """Add the sampled ``token_ids [M]`` to the histories of their rows, if ``counted [M]`` says so (None: all)."""
        if not self._counts and not self._bad_words:
            return
        for i, request in enumerate(sampled):
            counts, words = self._counts.get(request.row), self._bad_words.get(request.row)
            if counts is not None:
                times = torch.ones_like(counts.output[:1]) if counted is None else counted[i : i + 1].to(torch.int32)
                counts.output.index_add_(0, token_ids[i : i + 1], times)
            if words is not None:
                recent = torch.cat([words.recent[1:], token_ids[i : i + 1]])
                words.recent = recent if counted is None else torch.where(counted[i], recent, words.recent)

    def any_row(self, rows: SamplingTensors) -> SamplingMetadata:
        """Describe rows whose parameters are known to the device only: every filter is applied."""
        return _core(rows, all_greedy=False, candidates=self._vocab_size, uses_min_p=True)

    def edited(self, sampled: Sequence[ScheduledRequest], edits: StepEdits = NO_EDITS) -> list[int]:
        """Return the indices of the requests whose logits change before sampling.

        Their rows ask for more than temperature, top-k, top-p and min-p.
        """
        if not self._editing and edits is NO_EDITS:
            return []
        rows = self._editing | edits.masks.keys() | edits.processors.keys()
        return [i for i, request in enumerate(sampled) if request.row in rows]

    def num_logprobs(self, sampled: Sequence[ScheduledRequest]) -> dict[int, int]:
        """Return index in ``sampled`` -> number of alternatives, for rows that want log probabilities.

        With 0 alternatives, only the sampled token's log probability is wanted.
        """
        table = self._num_logprobs
        if not table:
            return {}
        return {i: n for i, request in enumerate(sampled) if (n := table.get(request.row)) is not None}

    def without_edits(self, sampled: Sequence[ScheduledRequest], rows: SamplingTensors) -> SamplingMetadata:
        """Describe the requests that sample, in order, without edits. ``rows`` are their parameters on the device."""
        params = [self._rows.sampling[request.row] for request in sampled]
        return _core(
            rows,
            all_greedy=all(p.temperature == 0 for p in params),
            candidates=filter_candidates([p.top_k for p in params], [p.top_p for p in params], self._vocab_size),
            uses_min_p=any(p.min_p > 0 for p in params),
        )

    def with_edits(
        self, sampled: Sequence[ScheduledRequest], rows: SamplingTensors, edits: StepEdits = NO_EDITS
    ) -> SamplingMetadata:
        params = [self._rows.sampling[request.row] for request in sampled]
        generated = [r.start + r.num_tokens - int(self._rows.num_prompt_tokens[r.row]) for r in sampled]
        processors = {i: edits.processors[r.row] for i, r in enumerate(sampled) if r.row in edits.processors}
        return dataclasses.replace(
            self.without_edits(sampled, rows),
            penalties=self._penalties(sampled, params),
            bias=self._bias(sampled),
            allowed=self._allowed_mask(sampled, edits),
            blocked=self._blocked(sampled, params, generated),
            processors=processors or None,
        )

    def _penalties(self, sampled: Sequence[ScheduledRequest], params: list[RowSampling]) -> Penalties | None:
        rows = [self._with_drafts(self._counts.get(r.row), r.draft_token_ids) for r in sampled]
        if not any(rows):
            return None
        none = Counts(
            torch.zeros(self._vocab_size, dtype=torch.int32, device=self._device),
            torch.zeros(self._vocab_size, dtype=torch.bool, device=self._device),
        )
        counts = [row or none for row in rows]
        return Penalties(
            presence=self._floats([p.presence_penalty for p in params]),
            frequency=self._floats([p.frequency_penalty for p in params]),
            repetition=self._floats([p.repetition_penalty for p in params]),
            output_counts=torch.stack([c.output for c in counts]),
            prompt_mask=torch.stack([c.prompt for c in counts]),
        )

    def _with_drafts(self, counts: Counts | None, drafts: list[int]) -> Counts | None:
        if counts is None or not drafts:
            return counts
        times = torch.ones(len(drafts), dtype=torch.int32, device=self._device)
        return Counts(counts.output.index_add(0, self._ints(drafts), times), counts.prompt)

    def _bias(self, sampled: Sequence[ScheduledRequest]) -> LogitBias | None:
        found = [(i, *self._biases[r.row]) for i, r in enumerate(sampled) if r.row in self._biases]
        if not found:
            return None
        places, tokens, values = zip(*found, strict=True)
        return LogitBias(self._rows_of(places, tokens), torch.cat(tokens), torch.cat(values))

    def _allowed_mask(self, sampled: Sequence[ScheduledRequest], edits: StepEdits) -> Tensor | None:
        steps = [edits.masks.get(r.row) for r in sampled]
        of_steps = [masks[len(r.draft_token_ids)] if masks else None for r, masks in zip(sampled, steps, strict=True)]
        masks = [_both(self._allowed.get(r.row), mask) for r, mask in zip(sampled, of_steps, strict=True)]
        if all(mask is None for mask in masks):
            return None
        everything = torch.ones(self._vocab_size, dtype=torch.bool, device=self._device)
        return torch.stack([everything if mask is None else mask for mask in masks])

    def _blocked(
        self, sampled: Sequence[ScheduledRequest], params: list[RowSampling], generated: list[int]
    ) -> BlockedTokens | None:
        """Ends before ``min_tokens``, and last tokens of bad words, active where their beginning was just generated."""
        places: list[int] = []
        tokens, active = [], []
        for i, (request, p, count) in enumerate(zip(sampled, params, generated, strict=True)):
            ends = self._ends.get(request.row)
            if ends is not None and count < p.min_tokens:
                places.append(i)
                tokens.append(ends)
                active.append(torch.ones_like(ends, dtype=torch.bool))
            words = self._bad_words.get(request.row)
            if words is not None:
                places.append(i)
                tokens.append(words.last)
                drafts = request.draft_token_ids
                active.append((words.after(self._ints(drafts)) if drafts else words).blocked())
        if not places:
            return None
        return BlockedTokens(self._rows_of(places, tokens), torch.cat(tokens), torch.cat(active))

    def _rows_of(self, places: Sequence[int], tokens: Sequence[Tensor]) -> Tensor:
        """Each place as often as it has tokens, in one copy to the device."""
        counts = torch.tensor([len(each) for each in tokens])
        return to_device(torch.tensor(places).repeat_interleave(counts), self._device)

    def _floats(self, values: list[float]) -> Tensor:
        return to_device(torch.tensor(values, dtype=torch.float32), self._device)

    def _ints(self, values: list[int]) -> Tensor:
        return device_ints(values, self._device)


def _both(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """Combine two masks: a token is allowed if both allow it. None allows everything."""
    if a is None or b is None:
        return b if a is None else a
    return a & b


def _core(rows: SamplingTensors, *, all_greedy: bool, candidates: int, uses_min_p: bool) -> SamplingMetadata:
    return SamplingMetadata(
        temperature=rows.temperature,
        top_k=rows.top_k,
        top_p=rows.top_p,
        min_p=rows.min_p,
        seeds=rows.seeds,
        positions=rows.positions,
        all_greedy=all_greedy,
        candidates=candidates,
        uses_min_p=uses_min_p,
    )
