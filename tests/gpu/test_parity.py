"""The Triton kernels in whole models: every architecture computes transformers' function on the GPU, in float32.

The references run on the CPU in float64. Greedy tokens must be equal. Logits may differ, since these random models
magnify rounding: transformers in float32 is up to 8e-5 from float64. If any operation sums in another order, logits
differ by up to 3e-4, though every kernel alone is as close to float64 as its reference (``tests/ops``). The same tests
with torch's operations on the CPU, where logits agree to 1e-4, are in ``tests/models``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness import Harness, Sequence
from tests.models.test_parity import (
    ARCHITECTURES,
    GEOMETRIES,
    HYBRID,
    LENGTHS,
    STEPS,
    assert_greedy,
    prompt,
    reference_logits,
)
from tests.tiny import make_checkpoint, make_model
from weft.ops.backend import Backend

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
TOLERANCE = 5e-4
"""Upper bound on the error of logits, which are between -3 and 3."""


def assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.shape == want.shape
    assert (got - want).abs().max().item() < TOLERANCE


def load(arch: str, path: Path, backend: Backend = Backend.TRITON, **overrides: Any) -> tuple[Harness, Any]:
    folder = make_checkpoint(arch, path, **overrides)
    reference = make_model(arch, **overrides)
    if arch != "Inkling2ForCausalLM":  # its reference casts to float32 inside, and does not run in float64
        reference = reference.double()
    return Harness(folder, device=DEVICE, backend=backend), reference


@pytest.mark.parametrize("backend", [Backend.TORCH, Backend.TRITON])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_prompts_of_all_lengths_and_forty_greedy_tokens(arch: str, backend: Backend, tmp_path: Path) -> None:
    harness, reference = load(arch, tmp_path, backend)
    sequences = [harness.sequence(prompt(n)) for n in LENGTHS]
    logits = [harness.run([(sequence, len(sequence.tokens))])[0] for sequence in sequences]
    for sequence, got in zip(sequences, logits, strict=True):
        assert_close(got, reference_logits(reference, sequence.tokens))
    harness.decode(sequences, logits, STEPS)
    for sequence, n in zip(sequences, LENGTHS, strict=True):
        assert len(sequence.tokens) == n + STEPS
        assert_greedy(reference, sequence.tokens, n)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_chunked_prefill_mixed_batches_and_padding(arch: str, tmp_path: Path) -> None:
    """Decodes and prefill chunks of several sequences in one forward, with NaN padding rows; nothing leaks."""
    harness, reference = load(arch, tmp_path)
    a, b, c = (harness.sequence(prompt(n)) for n in (66, 130, 65))
    steps = [
        ([(a, 64), (b, 1)], 3, 1),
        ([(a, 1), (b, 64), (c, 37)], 1, 0),
        ([(c, 28), (a, 1)], 5, 2),
        ([(b, 65)], 2, 3),
    ]
    got: dict[int, list[torch.Tensor]] = {id(s): [] for s in (a, b, c)}
    for work, pad_tokens, pad_seqs in steps:
        results = harness.run(work, pad_tokens=pad_tokens, pad_seqs=pad_seqs)
        for (sequence, _), logits in zip(work, results, strict=True):
            got[id(sequence)].append(logits)
    for sequence in (a, b, c):
        done = torch.cat(got[id(sequence)])
        assert done.shape[0] == len(sequence.tokens)
        assert_close(done, reference_logits(reference, sequence.tokens))


@pytest.mark.parametrize("arch", HYBRID)
def test_states_stored_at_any_position_continue_the_sequence(arch: str, tmp_path: Path) -> None:
    harness, reference = load(arch, tmp_path)
    tokens = prompt(150)
    want = reference_logits(reference, tokens)
    source = harness.sequence(tokens)
    source.checkpoints = {p: harness.free_slot() for p in (1, 2, 63, 64, 65, 149)}
    assert_close(harness.run([(source, 150)])[0], want)
    for position, slot in source.checkpoints.items():
        fork = Sequence(tokens, slot, source.pages, num_computed=position)
        assert_close(harness.run([(fork, 150 - position)])[0], want[position:])


@pytest.mark.parametrize(("arch", "overrides"), GEOMETRIES)
def test_awkward_geometries(arch: str, overrides: dict[str, Any], tmp_path: Path) -> None:
    harness, reference = load(arch, tmp_path, **overrides)
    sequences = [harness.sequence(prompt(n, harness.config.vocab_size)) for n in (130, 65)]
    logits = harness.run([(s, len(s.tokens)) for s in sequences], pad_tokens=2, pad_seqs=1)
    for sequence, got in zip(sequences, logits, strict=True):
        assert_close(got, reference_logits(reference, sequence.tokens))
    harness.decode(sequences, logits, 6)
    for sequence, n in zip(sequences, (130, 65), strict=True):
        assert_greedy(reference, sequence.tokens, n)
