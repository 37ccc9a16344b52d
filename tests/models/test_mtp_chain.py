"""A head with a layer for each draft: the published function, drafts, caches, and checkpoints with and without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.fp8_checkpoints import edit_tensors
from tests.harness import Harness, Sequence
from tests.media import overrides
from tests.models.mtp_chain_reference import make_chain_checkpoint
from tests.models.test_mtp import by_sequence, head_output
from tests.models.test_parity import prompt
from weft.config.checkpoint import read_checkpoint_config
from weft.config.weights import weight_bytes
from weft.errors import WeightsError
from weft.forward_context import ForwardContext, forward_context
from weft.models.mtp import DraftInputs
from weft.models.mtp_chain import ChainDrafter
from weft.ops.backend import Backend

INKLING = "InklingForCausalLM"


def run_head(harness: Harness, work: list[tuple[Sequence, int]], pad_tokens: int = 0) -> list[list[Tensor]]:
    """Return the output of every layer for the next tokens of every sequence."""
    parts = [by_sequence(output, work) for output in head_output(harness, work, pad_tokens)]
    return [list(rows) for rows in zip(*parts, strict=True)]


@pytest.mark.parametrize("arch", [INKLING, "InklingForConditionalGeneration"])
def test_every_layer_is_the_published_function_in_chunks_and_decodes(arch: str, tmp_path: Path) -> None:
    more = overrides(arch) if arch.endswith("ForConditionalGeneration") else {}
    folder, reference = make_chain_checkpoint(arch, tmp_path, rel_extent=120, unpadded_vocab_size=190, **more)
    harness = Harness(folder, mtp=True)
    a, b = harness.sequence(prompt(100)), harness.sequence(prompt(70))
    got_a, got_b = run_head(harness, [(a, 66)]), run_head(harness, [(b, 1)], pad_tokens=3)
    for count in (1, 1, 2):
        got_b += run_head(harness, [(b, count)])
    mixed = run_head(harness, [(a, 1), (b, 64)])
    for sequence, got in ((a, [*got_a, mixed[0]]), (b, [*got_b, mixed[1]])):
        for index, want in enumerate(reference.outputs(sequence.tokens, sequence.num_computed)):
            rows = torch.cat([part[index] for part in got])
            assert (rows[:index] == 0).all(), "rows of positions that the layer does not have"
            logits = harness.model.head_logits(rows[index:])
            torch.testing.assert_close(logits[:, :190].double(), reference.logits(want), atol=1e-4, rtol=0)
            assert (logits[:, 190:] == -torch.inf).all(), "ids that are never sampled"


def draft_inputs(
    harness: Harness, work: list[tuple[Sequence, int]], sampled: dict[int, int]
) -> tuple[Any, ForwardContext]:
    """Run the model over the next tokens. ``sampled``: row -> the token sampled after it."""
    context = harness.context_for(work)
    ids = [s.tokens[s.num_computed + i] for s, n in work for i in range(n)]
    next_ids = [s.tokens[(s.num_computed + i + 1) % len(s.tokens)] for s, n in work for i in range(n)]
    next_ids = [sampled.get(row, token) for row, token in enumerate(next_ids)]
    with torch.no_grad(), forward_context(context):
        return (harness.model(torch.tensor(ids)), torch.tensor(next_ids)), context


def snapshot(harness: Harness) -> dict[str, Tensor]:
    """Every state of every layer, by slot."""
    return {
        f"{layer}.{tensor.name}": harness.caches[layer][tensor.name].clone()
        for layer, spec in harness.spec.layers.items()
        for tensor in spec.states
    }


@pytest.mark.parametrize("local", [[0, 2], [1]])
def test_drafts_are_the_greedy_ones_of_the_reference_and_leave_no_state(local: list[int], tmp_path: Path) -> None:
    """The batch has a sequence that does not sample, a decode, two rejected drafts of another sequence, and two prompts
    that end. The step stores a state at the end of one prompt."""
    folder, reference = make_chain_checkpoint(INKLING, tmp_path, mtp_local_layer_ids=local, rel_extent=90)
    harness = Harness(folder, mtp=True)
    drafter = ChainDrafter(harness.model, 512, Backend.TORCH)
    a, b, c, d, e = (harness.sequence(prompt(n), capacity=n + 40) for n in (35, 20, 64, 25, 18))
    begun = (a, 30), (b, 19), (c, 10), (d, 12), (e, 10)
    for sequence, known in begun:
        run_head(harness, [(sequence, known)])
    a.checkpoints = {position: harness.free_slot() for position in (31, 32, 33)}  # after each draft but the last
    d.checkpoints = {25: harness.free_slot()}
    work = [(b, 1), (a, 4), (c, 16), (d, 13), (e, 8)]  # of a's tokens 30..33, the last two are rejected
    (hidden, next_ids), context = draft_inputs(harness, work, {0: 7, 2: 11, 33: 13, 41: 19})
    last, sequences = torch.tensor([0, 2, 33, 41]), torch.tensor([0, 1, 3, 4])
    with torch.no_grad(), forward_context(context):
        drafter.draft(DraftInputs(hidden, next_ids, last, sequences, context.batch), 1)
    filled = snapshot(harness)
    for sequence, known in begun:
        sequence.num_computed = 0
        run_head(harness, [(sequence, known)])
    (hidden, next_ids), context = draft_inputs(harness, work, {0: 7, 2: 11, 33: 13, 41: 19})
    with torch.no_grad(), forward_context(context):
        got = drafter.draft(DraftInputs(hidden, next_ids, last, sequences, context.batch), 3)
    texts = [*b.tokens, 7], [*a.tokens[:32], 11], [*d.tokens, 13], [*e.tokens, 19]
    assert got.tolist() == [reference.drafts(text, 3) for text in texts]
    for name, state in snapshot(harness).items():
        torch.testing.assert_close(state, filled[name], rtol=0, atol=0, equal_nan=True, msg=name)


def test_drafts_of_a_sequence_shorter_than_the_head(tmp_path: Path) -> None:
    """The last layer has no row before that of its draft."""
    folder, reference = make_chain_checkpoint(INKLING, tmp_path)
    harness = Harness(folder, mtp=True)
    sequence = harness.sequence(prompt(1))
    (hidden, next_ids), context = draft_inputs(harness, [(sequence, 1)], {0: 17})
    inputs = DraftInputs(hidden, next_ids, torch.tensor([0]), torch.tensor([0]), context.batch)
    with torch.no_grad(), forward_context(context):
        got = ChainDrafter(harness.model, 512, Backend.TORCH).draft(inputs, 3)
    assert got.tolist() == [reference.drafts([*sequence.tokens, 17], 3)]


def test_layers_that_do_not_run_are_not_loaded(tmp_path: Path) -> None:
    folder, _ = make_chain_checkpoint(INKLING, tmp_path)
    config = read_checkpoint_config(folder)
    assert config.mtp_chain == ("hybrid_sliding", "hybrid", "hybrid_sliding")
    names = {depth: {*config.with_mtp(depth).head_layers} for depth in (1, 2)}
    assert names[1] == {"mtp.layers.0.transformer_block"} and len(names[2]) == 2
    without = Harness(folder)
    assert "mtp" not in dict(without.model.named_children()) and not any("mtp" in name for name in without.caches)
    assert config.with_mtp().without_mtp() == without.config


def test_a_checkpoint_without_the_head_says_so(tmp_path: Path) -> None:
    folder, _ = make_chain_checkpoint(INKLING, tmp_path)
    edit_tensors(folder, lambda tensors: tensors.__delitem__("model.mtp.layers.1.input_proj.weight"))
    with pytest.raises(WeightsError, match=r"1 missing: mtp\.layers\.1\.input_proj\.weight"):
        Harness(folder, mtp=True)
    edit_tensors(folder, lambda tensors: [tensors.pop(name) for name in list(tensors) if ".mtp." in name])
    with pytest.raises(WeightsError, match=r"no multi-token-prediction head .*'ngram'"):
        Harness(folder, mtp=True)
    Harness(folder)


def test_weights_and_cache_are_counted(tmp_path: Path) -> None:
    folder, _ = make_chain_checkpoint(INKLING, tmp_path)
    with_head, without = Harness(folder, mtp=True), Harness(folder)
    counted = weight_bytes(with_head.config, "float32") - weight_bytes(without.config, "float32")
    held = sum(p.numel() * 4 for p in with_head.model.get_submodule("mtp").parameters() if p.dim() > 1)
    assert counted == held
    assert with_head.spec.page_bytes > without.spec.page_bytes and with_head.spec.slot_bytes > without.spec.slot_bytes
    assert with_head.spec.weights_per_token > without.spec.weights_per_token
