"""Drafts are verified: a few tokens of every sequence at once, with the states after each in slots of their own."""

from __future__ import annotations

import dataclasses
import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.harness import Harness, Sequence
from tests.models.test_parity import prompt, reference_logits
from tests.tiny import make_checkpoint, make_model
from tests.whole import unless_long
from weft.forward_context import ForwardContext, Verification, forward_context
from weft.ops.backend import Backend
from weft.ops.moe import fused_moe
from weft.quantization import unquantized

TOLERANCE = 1e-4


def verify(harness: Harness, sequences: list[Sequence], slots: list[list[int]]) -> list[Tensor]:
    """Logits ``[T, vocab_size]`` of the next T tokens of each sequence, with a padding sequence at the end."""
    count = len(slots[0])
    padding = Sequence([0] * count, 0, [0])
    context = harness.context_for([(sequence, count) for sequence in (*sequences, padding)])
    table = torch.tensor([*slots, [0] * count], dtype=torch.int32)
    batch = dataclasses.replace(context.batch, num_decodes=0, chunks=None, verification=Verification(count, table))
    ids = [s.tokens[s.num_computed + i] for s in (*sequences, padding) for i in range(count)]
    with torch.no_grad(), forward_context(ForwardContext(batch, harness.caches, harness.context.layers)):
        logits = harness.model.compute_logits(harness.model(torch.tensor(ids)))
    for sequence in sequences:
        sequence.num_computed += count
    return list(logits.split(count))[:-1]


VERIFY = ["KimiLinearForCausalLM", "Lfm2ForCausalLM", "Qwen4ExpForCausalLM"]
MORE = ["BailingHybridForCausalLM", "Glm5NextForConditionalGeneration"]
ATTEND_OR_DECAY_BY_HEAD = ["Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "OlmoHybridForCausalLM", "LlamaForCausalLM"]


ONE_BY_ONE = [f"{name}ForCausalLM" for name in ("Jamba", "RecurrentGemma", "Bamba", "MiniMax", "GptOss")]
"""Families whose layers decode the tokens of a sequence one after another."""


@pytest.mark.parametrize("arch", ATTEND_OR_DECAY_BY_HEAD + ONE_BY_ONE + unless_long(VERIFY, VERIFY + MORE))
def test_logits_and_the_states_after_every_token(arch: str, tmp_path: Path) -> None:
    harness, reference = Harness(make_checkpoint(arch, tmp_path), num_slots=20), make_model(arch)
    sequences = [harness.sequence(prompt(n)) for n in (30, 90)]
    want = [reference_logits(reference, sequence.tokens) for sequence in sequences]
    for sequence, known in zip(sequences, (9, 80), strict=True):
        harness.run([(sequence, known)])
    for _ in range(2):  # the second time from states that verification has left
        starts = [sequence.num_computed for sequence in sequences]
        slots = [[harness.free_slot(), harness.free_slot(), sequence.slot] for sequence in sequences]
        got = verify(harness, sequences, slots)
        for sequence, start, row, logits, expected in zip(sequences, starts, slots, got, want, strict=True):
            assert (logits - expected[start : start + 3]).abs().max() < TOLERANCE
            if harness.spec.has_states:
                for i, slot in enumerate(row[:2], 1):
                    fork = Sequence(sequence.tokens, slot, sequence.pages, num_computed=start + i)
                    rest = harness.run([(fork, 4)])[0]
                    assert (rest - expected[start + i : start + i + 4]).abs().max() < TOLERANCE


@pytest.mark.parametrize("arch", unless_long(VERIFY, VERIFY + MORE + ATTEND_OR_DECAY_BY_HEAD))
def test_rejected_drafts_leave_no_bit(arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rejected drafts change no bit of the accepted tokens' states, pages and logits, nor of later tokens. The bits are
    the same as of a sequence whose drafts were right. Experts compute each row alone, since the bits of a product
    depend on the rows that choose the expert."""
    monkeypatch.setattr(unquantized, "fused_moe", partial(_each_row_alone, fused_moe))
    harness, rng = Harness(make_checkpoint(arch, tmp_path), num_slots=30), random.Random(0)
    assert harness.config.verifies
    text, found = prompt(40), []
    for wrong in range(3):
        rng.seed(wrong)
        sequence = harness.sequence(text)
        harness.run([(sequence, 21)])
        logits = []
        for accepted in (1, 2, 0, 1, 2, 0):
            start = sequence.num_computed
            kept = start + 1 + accepted
            rejected = [rng.randrange(200) for _ in range(2 - accepted)] if wrong else text[kept : start + 3]
            sequence.tokens = [*text[:kept], *rejected, *text[start + 3 :]]
            slots = [harness.free_slot(), harness.free_slot(), sequence.slot]
            logits.append(verify(harness, [sequence], [slots])[0][: 1 + accepted])
            sequence.slot, sequence.num_computed = slots[accepted], kept
            harness._free_slots += [slot for slot in slots if slot != sequence.slot]
        found.append([*logits, *remembered(harness, sequence)])
        harness.release(sequence)
    for others in found[1:]:
        for mine, other in zip(found[0], others, strict=True):
            torch.testing.assert_close(mine, other, rtol=0, atol=0, equal_nan=True)


def _each_row_alone(operation: Any, *args: Any, backend: Backend, **options: Any) -> Any:
    return operation(*args, backend=Backend.INVARIANT_TORCH, **options)


def remembered(harness: Harness, sequence: Sequence) -> list[Tensor]:
    """All that the caches hold of the sequence's computed tokens."""
    found, count = [], sequence.num_computed
    for name, spec in harness.spec.layers.items():
        cache = harness.caches[name]
        found += [cache[state.name][sequence.slot].clone() for state in spec.states]
        for paged in spec.paged:  # of complete pools, if an entry is a part of a pool's
            entries = cache[paged.name][sequence.pages].flatten(0, 1)
            found.append(entries[: count // spec.page_multiple * spec.page_multiple].clone())
    return found
