"""The sampler gets what each row asked for: histories start, grow and are forgotten with their rows."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from weft.layers.sampler import SamplingMetadata
from weft.messages import NewRequest, RowSampling, ScheduledRequest
from weft.runner.rows import RowTable
from weft.runner.sampling.state import NO_TOKEN, SamplingState
from weft.runner.step_inputs import SamplingTensors

VOCAB = 12
CPU = torch.device("cpu")
NO_ROWS = SamplingTensors(*[torch.zeros(0)] * 8)


class Rig:
    """Rows and inputs, driven as the runner does: every order samples one token."""

    def __init__(self) -> None:
        self.rows = RowTable(4, 8, CPU)
        self.inputs = SamplingState(self.rows, VOCAB, CPU)
        self.lengths: dict[int, int] = {}

    def fill(self, row: int, prompt: list[int], output: list[int] | None = None, **params: Any) -> None:
        new = NewRequest(row, array("I", prompt + (output or [])), len(prompt), RowSampling(**params))
        self.rows.add(new)
        self.inputs.add_row(new)
        self.lengths[row] = len(new.token_ids)

    def scheduled(self, *rows: int) -> list[ScheduledRequest]:
        return [ScheduledRequest(row, self.lengths[row] - 1, 1, [], 0, True) for row in rows]

    def build(self, *rows: int) -> SamplingMetadata:
        return self.inputs.with_edits(self.scheduled(*rows), NO_ROWS)

    def sample(self, tokens: dict[int, int]) -> None:
        self.inputs.record(self.scheduled(*tokens), torch.tensor(list(tokens.values())))
        for row in tokens:
            self.lengths[row] += 1


def blocked(batch: SamplingMetadata) -> set[tuple[int, int]]:
    if batch.blocked is None:
        return set()
    pairs, active = zip(batch.blocked.rows.tolist(), batch.blocked.tokens.tolist(), strict=True), batch.blocked.active
    assert active is not None
    return {pair for pair, counts in zip(pairs, active.tolist(), strict=True) if counts}


def test_rows_that_ask_for_nothing_cost_nothing() -> None:
    rig = Rig()
    rig.fill(0, [1, 2])
    rig.fill(1, [3], temperature=0.0)
    batch = rig.build(0, 1)
    assert not batch.edits_logits and not batch.all_greedy
    assert (batch.candidates, batch.uses_min_p) == (0, False)
    assert rig.inputs.edited(rig.scheduled(0, 1)) == [] and rig.inputs.num_logprobs(rig.scheduled(0, 1)) == {}
    assert rig.build(1).all_greedy


def test_flags_of_the_batch() -> None:
    rig = Rig()
    rig.fill(0, [1], top_k=3, logprobs=2)
    rig.fill(1, [1], min_p=0.1, logprobs=0)
    rig.fill(2, [1], top_p=0.5)
    assert (rig.build(0).candidates, rig.build(0).uses_min_p) == (3, False)
    assert (rig.build(1, 0).candidates, rig.build(1, 0).uses_min_p) == (3, True)
    assert rig.build(0, 2).candidates == VOCAB
    assert rig.inputs.num_logprobs(rig.scheduled(2, 1, 0)) == {1: 0, 2: 2}
    assert not rig.inputs.edited(rig.scheduled(0, 1, 2))


def test_counts_start_with_what_a_resumed_request_had_and_grow() -> None:
    rig = Rig()
    rig.fill(2, [1, 1, 4], [5, 6, 5], frequency_penalty=0.5, presence_penalty=0.25, repetition_penalty=1.5)
    rig.fill(0, [9])
    rig.sample({0: 3, 2: 6})
    rig.sample({2: 7})
    penalties = rig.build(0, 2).penalties
    assert penalties is not None
    assert penalties.output_counts.tolist() == [[0] * VOCAB, [0, 0, 0, 0, 0, 2, 2, 1, 0, 0, 0, 0]]
    assert penalties.prompt_mask[1].nonzero().flatten().tolist() == [1, 4]
    assert not penalties.prompt_mask[0].any()
    assert penalties.frequency.tolist() == [0.0, 0.5] and penalties.presence.tolist() == [0.0, 0.25]
    assert penalties.repetition.tolist() == [1.0, 1.5]
    assert rig.build(0).penalties is None


def test_a_row_s_next_owner_inherits_nothing() -> None:
    rig = Rig()
    everything: dict[str, Any] = {"frequency_penalty": 1.0, "bad_words": [[3]], "allowed_token_ids": [3, 4]}
    everything |= {"logprobs": 2}
    rig.fill(1, [1], **everything)
    rig.sample({1: 4})
    rig.fill(1, [2])
    assert not rig.build(1).edits_logits and not rig.inputs.num_logprobs(rig.scheduled(1))
    rig.fill(1, [2], **everything)
    rig.inputs.free_row(1)
    assert not rig.inputs.edited(rig.scheduled(1))
    batch = rig.build(1)
    assert batch.penalties is None and batch.allowed is None and batch.blocked is None


def test_bad_words_of_any_length_are_blocked_when_their_beginning_stands() -> None:
    rig = Rig()
    rig.fill(0, [7, 8], [5], bad_words=[[3], [5, 6], [5, 5, 9], [8, 5, 1]])
    assert blocked(rig.build(0)) == {(0, 3), (0, 6)}  # the prompt's 8 is no beginning
    rig.sample({0: 5})
    assert blocked(rig.build(0)) == {(0, 3), (0, 6), (0, 9)}
    rig.sample({0: 9})
    assert blocked(rig.build(0)) == {(0, 3)}


def test_rejected_tokens_leave_no_history() -> None:
    """Three tokens are recorded, of which the last is rejected."""
    rig = Rig()
    rig.fill(0, [1], bad_words=[[4, 6], [5, 9]], frequency_penalty=1.0)
    rig.inputs.record(rig.scheduled(0) * 3, torch.tensor([3, 4, 5]), torch.tensor([True, True, False]))
    batch = rig.build(0)
    assert blocked(batch) == {(0, 6)}
    assert batch.penalties is not None and batch.penalties.output_counts[0].nonzero().flatten().tolist() == [3, 4]


def test_drafts_count_as_generated_where_they_stand() -> None:
    """For the position behind them only: nothing of them stays."""
    rig = Rig()
    rig.fill(0, [1], [2], bad_words=[[5, 6], [2, 9]], frequency_penalty=1.0)
    masks = [bytes([1, 0]), bytes([2, 0]), bytes([4, 0])]
    edits = rig.inputs.step_edits({0: masks}, {})
    for drafts, banned, counts, mask in (([], 9, {2: 1}, 0), ([5], 6, {2: 1, 5: 1}, 1), ([5, 5], 6, {2: 1, 5: 2}, 2)):
        (request,) = rig.scheduled(0)
        batch = rig.inputs.with_edits([replace(request, draft_token_ids=drafts)], NO_ROWS, edits)
        assert batch.penalties is not None and batch.allowed is not None
        assert blocked(batch) == {(0, banned)}
        assert batch.penalties.output_counts[0].tolist() == [counts.get(token, 0) for token in range(VOCAB)]
        assert batch.allowed[0].nonzero().flatten().tolist() == [mask]


def test_an_empty_history_matches_no_beginning() -> None:
    rig = Rig()
    rig.fill(0, [5], bad_words=[[5, 6], [2]])
    assert blocked(rig.build(0)) == {(0, 2)} and NO_TOKEN < 0


def test_ends_are_blocked_before_min_tokens_only() -> None:
    rig = Rig()
    rig.fill(0, [1, 2], min_tokens=2, blocked_before_min=[10, 11])
    rig.fill(3, [1], bad_words=[[4]])
    assert rig.inputs.edited(rig.scheduled(3, 0)) == [0, 1] and rig.inputs.edited(rig.scheduled(0)) == [0]
    assert blocked(rig.build(3, 0)) == {(0, 4), (1, 10), (1, 11)}
    rig.sample({0: 5})
    assert blocked(rig.build(0)) == {(0, 10), (0, 11)}
    rig.sample({0: 5})
    assert blocked(rig.build(0)) == set()


def test_long_lists_are_converted_once_and_not_for_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    rig.fill(1, [1], logit_bias={4: 1.5}, min_tokens=2, blocked_before_min=[3, 5], bad_words=[[7], [8]])
    for name in ("_ints", "_floats"):
        monkeypatch.setattr(rig.inputs, name, lambda values: pytest.fail("converted again"))
    batch = rig.build(1)
    assert blocked(batch) == {(0, 3), (0, 5), (0, 7), (0, 8)}
    assert batch.bias is not None and batch.bias.tokens.tolist() == [4]
    rig.inputs.free_row(1)
    assert rig.build(1).bias is None and blocked(rig.build(1)) == set()


def test_bias_and_allowed_ids_stand_in_their_rows() -> None:
    rig = Rig()
    rig.fill(0, [1], logit_bias={4: 1.5, 2: -3.0})
    rig.fill(1, [1])
    rig.fill(2, [1], logit_bias={4: 9.0}, allowed_token_ids=[0, 11])
    batch = rig.build(1, 2, 0)
    assert batch.bias is not None and batch.allowed is not None
    entries = zip(batch.bias.rows.tolist(), batch.bias.tokens.tolist(), batch.bias.values.tolist(), strict=True)
    assert set(entries) == {(1, 4, 9.0), (2, 4, 1.5), (2, 2, -3.0)}
    assert batch.allowed.sum(-1).tolist() == [VOCAB, 2, VOCAB]
    assert batch.allowed[1].nonzero().flatten().tolist() == [0, 11]
