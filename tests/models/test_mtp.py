"""The multi-token-prediction head: the published function, its drafts, and when it is loaded."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.fp8_checkpoints import edit_tensors
from tests.harness import Harness, Sequence, leave_parts
from tests.models.mtp_reference import make_mtp_checkpoint
from tests.models.test_parity import prompt
from tests.tiny import make_checkpoint
from weft.config.checkpoint import read_checkpoint_config
from weft.config.weights import weight_bytes
from weft.errors import ConfigError, WeightsError
from weft.forward_context import forward_context
from weft.models.mtp import DraftInputs, MtpDrafter
from weft.ops.backend import Backend

NEXT = "Qwen3NextForCausalLM"
LING = "BailingHybridForCausalLM"
QWEN4 = "Qwen4ExpForCausalLM"
GLM5 = "Glm5NextForConditionalGeneration"
WITH_HEAD = (
    NEXT, "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM", "Qwen3_5ForConditionalGeneration", LING, QWEN4, GLM5
)  # fmt: skip


def assert_close(got: Tensor, want: Tensor) -> None:
    """Against float64. Hidden states are of order one, so no bound of single values: how far off they are together."""
    assert got.shape == want.shape
    assert (got - want).norm() < 2e-5 * want.norm()


def head_output(harness: Harness, work: list[tuple[Sequence, int]], pad_tokens: int) -> Any:
    """Run model and head over the next tokens of every sequence, and return what the head does."""
    context = harness.context_for(work, pad_tokens=pad_tokens)
    spans = [range(sequence.num_computed, sequence.num_computed + n) for sequence, n in work]
    ids = [s.tokens[p] for (s, _), span in zip(work, spans, strict=True) for p in span]
    next_ids = [s.tokens[p + 1] for (s, _), span in zip(work, spans, strict=True) for p in span]
    ids, next_ids = (torch.tensor(x + [0] * pad_tokens) for x in (ids, next_ids))
    decoder: Any = harness.model.model
    with torch.no_grad(), forward_context(context):
        hidden = harness.model(ids)
        embedded = getattr(decoder, "embedded", decoder.embed_tokens)(next_ids)
        found = harness.model.get_submodule("mtp")(embedded, hidden)
    for sequence, n in work:
        sequence.num_computed += n
    return found


def by_sequence(rows: Tensor, work: list[tuple[Sequence, int]]) -> list[Tensor]:
    """``[n, hidden_size]`` of each sequence, without padding."""
    counts = [n for _, n in work]
    return list(rows[: sum(counts)].split(counts))


def run_head(harness: Harness, work: list[tuple[Sequence, int]], pad_tokens: int = 0) -> list[Tensor]:
    """Return the rows of the head for the next tokens of every sequence, ``[n, hidden_size]`` each."""
    return by_sequence(head_output(harness, work, pad_tokens), work)


@pytest.mark.parametrize(("arch", "changes"), [*((arch, {}) for arch in WITH_HEAD), (NEXT, {"num_experts": 0})])
def test_the_head_is_the_published_function_in_chunks_and_decodes(
    arch: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    folder, reference = make_mtp_checkpoint(arch, tmp_path, **changes)
    harness = Harness(folder, mtp=True)
    a, b = harness.sequence(prompt(100)), harness.sequence(prompt(70))
    got_a = run_head(harness, [(a, 66)])
    got_b = run_head(harness, [(b, 5)], pad_tokens=3)
    mixed = run_head(harness, [(a, 1), (b, 64)])
    got_a += mixed[:1]
    got_b += mixed[1:]
    for sequence, got in ((a, got_a), (b, got_b)):
        count = sequence.num_computed
        want = reference(sequence.tokens[1 : count + 1], reference.hidden_states(sequence.tokens)[:count])
        assert_close(torch.cat(got), want)


@pytest.mark.parametrize("arch", [*WITH_HEAD[:2], QWEN4, GLM5])
def test_drafts_are_the_greedy_ones_of_the_reference(
    arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch has two sequences that sample, the second after rejected drafts, and a sequence that does not sample.
    Sums are left to the norms that follow, as on a GPU, in the head too."""
    left = leave_parts(monkeypatch)
    folder, reference = make_mtp_checkpoint(arch, tmp_path)
    harness = Harness(folder, mtp=True)
    drafter = MtpDrafter(harness.model, 512, Backend.TORCH)
    a, b, c = (harness.sequence(prompt(n), capacity=n + 40) for n in (35, 20, 64))
    for sequence, known in ((a, 30), (b, 19), (c, 10)):
        run_head(harness, [(sequence, known)])
    work = [(b, 1), (a, 4), (c, 16)]  # of a's tokens 30..33, the last two are rejected
    context = harness.context_for(work)
    ids = [s.tokens[s.num_computed + i] for s, n in work for i in range(n)]
    next_ids = [s.tokens[(s.num_computed + i + 1) % len(s.tokens)] for s, n in work for i in range(n)]
    sampled_b, sampled_a = 7, 11
    next_ids[0], next_ids[2] = sampled_b, sampled_a
    with torch.no_grad(), forward_context(context):
        hidden = harness.model(torch.tensor(ids))
        last, sequences = torch.tensor([0, 2]), torch.tensor([0, 1])
        got = drafter.draft(DraftInputs(hidden, torch.tensor(next_ids), last, sequences, context.batch), 3)
    want = [reference.drafts([*b.tokens, sampled_b], 3), reference.drafts([*a.tokens[:32], sampled_a], 3)]
    assert got.tolist() == want
    assert arch in (QWEN4, GLM5) or left[-1].shape[:2] == (2, 2), "of a draft, for two sequences"


def test_drafts_at_the_end_of_the_context_touch_no_other_page(tmp_path: Path) -> None:
    folder, _ = make_mtp_checkpoint(NEXT, tmp_path)
    harness = Harness(folder, mtp=True)
    full = harness.sequence(prompt(32), capacity=32)
    run_head(harness, [(full, 30)])
    before = {name: {k: t.clone() for k, t in cache.items()} for name, cache in harness.caches.items()}
    context = harness.context_for([(full, 2)])
    with torch.no_grad(), forward_context(context):
        hidden = harness.model(torch.tensor(full.tokens[30:]))
        inputs = DraftInputs(hidden, torch.tensor([3, 4]), torch.tensor([1]), torch.tensor([0]), context.batch)
        assert MtpDrafter(harness.model, 512, Backend.TORCH).draft(inputs, 4).shape == (1, 4)
    cache = harness.caches["mtp.layers.0.self_attn"]
    others = [page for page in range(96) if page not in full.pages]
    for name in ("k", "v"):
        torch.testing.assert_close(
            cache[name][others], before["mtp.layers.0.self_attn"][name][others], rtol=0, atol=0, equal_nan=True
        )


def test_what_is_no_token_is_drafted_from_without_harm(tmp_path: Path) -> None:
    """Where the start walks through steps whose kernels do not run, what was sampled is arbitrary."""
    folder, _ = make_mtp_checkpoint(NEXT, tmp_path)
    harness = Harness(folder, mtp=True)
    sequence = harness.sequence(prompt(9))
    context = harness.context_for([(sequence, 3)])
    with torch.no_grad(), forward_context(context):
        hidden = harness.model(torch.tensor(sequence.tokens[:3]))
        next_ids = torch.tensor([-1, 1 << 40, -(1 << 40)])
        inputs = DraftInputs(hidden, next_ids, torch.tensor([2]), torch.tensor([0]), context.batch)
        drafts = MtpDrafter(harness.model, 512, Backend.TORCH).draft(inputs, 2)
    assert ((drafts >= 0) & (drafts < harness.config.vocab_size)).all()


@pytest.mark.parametrize("arch", [NEXT, LING, QWEN4, GLM5])
def test_without_speculation_the_head_is_left_out(arch: str, tmp_path: Path) -> None:
    folder, reference = make_mtp_checkpoint(arch, tmp_path)
    harness = Harness(folder)
    assert "mtp" not in dict(harness.model.named_children()) and not any("mtp" in name for name in harness.caches)
    sequence = harness.sequence(prompt(9))
    with torch.no_grad():
        want = reference._model[0](torch.tensor([sequence.tokens])).logits[0].float()
    assert_close(harness.run([(sequence, 9)])[0], want)


def test_a_checkpoint_without_the_head_says_so(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"no multi-token-prediction head .*'ngram'"):
        Harness(make_checkpoint(NEXT, tmp_path / "without"), mtp=True)
    folder, _ = make_mtp_checkpoint(NEXT, tmp_path / "incomplete")
    edit_tensors(folder, lambda tensors: tensors.__delitem__("mtp.fc.weight"))
    with pytest.raises(WeightsError, match=r"1 missing: mtp\.fc\.weight"):
        Harness(folder, mtp=True)


@pytest.mark.parametrize(
    ("arch", "keys"),
    [
        ("Qwen3ForCausalLM", {}),
        (NEXT, {"mtp_num_hidden_layers": 0}),
        (NEXT, {"num_nextn_predict_layers": 2}),
        (NEXT, {"mtp_use_dedicated_embeddings": True}),
    ],
)
def test_models_without_such_a_head_are_refused(arch: str, keys: dict[str, Any], tmp_path: Path) -> None:
    file = make_checkpoint(arch, tmp_path) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | keys))
    with pytest.raises(ConfigError, match=r"'mtp' needs .* this \w+ has (no|2) layers .*'ngram'"):
        read_checkpoint_config(tmp_path).with_mtp()


@pytest.mark.parametrize("arch", [*WITH_HEAD[:3], QWEN4, GLM5])
def test_weights_and_cache_are_counted(arch: str, tmp_path: Path) -> None:
    folder, _ = make_mtp_checkpoint(arch, tmp_path)
    with_head, without = Harness(folder, mtp=True), Harness(folder)
    counted = weight_bytes(with_head.config, "float32") - weight_bytes(without.config, "float32")
    head = with_head.model.get_submodule("mtp")
    held = {name: p.numel() * 4 for name, p in head.named_parameters() if p.dim() > 1}
    config = with_head.config
    streams = 3 * config.streams.count if config.streams is not None else 0
    padding = config.hidden_size * 4 * 8 * (1 + streams)  # rows that only align a router and connections
    assert 0 <= sum(held.values()) - counted <= padding
    assert with_head.spec.page_bytes > without.spec.page_bytes
    assert with_head.spec.weights_per_token > without.spec.weights_per_token
    assert dataclasses.replace(with_head.config, runs_mtp=False) == without.config
