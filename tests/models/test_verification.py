"""Drafts are verified: a few tokens of every sequence at once, with the states after each in slots of their own."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.harness import Harness, Sequence
from tests.models.test_parity import prompt, reference_logits
from tests.tiny import make_checkpoint, make_model
from weft.forward_context import ForwardContext, Verification, forward_context

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


@pytest.mark.parametrize(
    "arch", ["Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "OlmoHybridForCausalLM", "LlamaForCausalLM"]
)
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
