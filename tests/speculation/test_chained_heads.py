"""A head with a layer for each draft (Inkling): drafts in whole engines are the reference's, whatever was accepted."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.engine.conftest import assert_idle
from tests.media import INKLING, Engine, Prompt, assert_reference, overrides
from tests.models.mtp_chain_reference import make_chain_checkpoint
from tests.ranks import fork_ranks
from tests.speculation.conftest import make_repeating_checkpoint
from tests.speculation.test_heads import SETTINGS, case
from tests.whole import RUNS_LONG, takes_long, unless_long
from weft import LLM, SamplingParams
from weft.config import resolve
from weft.errors import ConfigError

TEXT = "InklingForCausalLM"
DRAFTS = {"method": "mtp", "num_speculative_tokens": 3}
MODES = {1: "FULL_DECODE_ONLY", 2: "NONE", 3: "FULL_DECODE_ONLY"}
"""By number of drafts."""


class Compared:
    """An engine and the reference of its head. Every draft is compared with the reference's."""

    def __init__(self, folder: Path, reference: Any, **settings: Any) -> None:
        self.llm = LLM(str(folder), **SETTINGS | {"skip_tokenizer_init": True, "speculative_config": DRAFTS} | settings)
        self.reference, self.count = reference, 0

    def run(self, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        names = [self.llm.add_request({"prompt_token_ids": prompt}, params) for prompt in prompts]
        done: dict[str, list[int]] = {}
        while not self.llm.is_finished():
            done |= {o.request_id: list(o.outputs[0].token_ids) for o in self.llm.step() if o.finished}
            for running in self.llm._core.scheduler._rows.running:
                request = running.request
                if request.draft_token_ids:
                    known = request.known_token_ids.tolist()
                    want = self.reference.drafts(known, len(request.draft_token_ids))
                    assert list(request.draft_token_ids) == want, (len(known), num_tokens)
                    self.count += 1
        return [done[name] for name in names]


def prompts(*lengths: int, seed: int = 3) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, 200) for _ in range(n)] for n in lengths]


@pytest.mark.parametrize(
    ("mode", "repeats", "more"),
    [
        pytest.param("NONE", False, {}, marks=takes_long),
        pytest.param("FULL_DECODE_ONLY", True, {}, marks=takes_long),
        pytest.param("FULL", True, {}, marks=takes_long),
        ("FULL_DECODE_ONLY", True, {"deterministic": True, "max_num_batched_tokens": 80}),
    ],
)
def test_drafts_are_the_references(mode: str, repeats: bool, more: dict[str, Any], tmp_path: Path) -> None:
    """Compare drafts of prompts in several chunks, in steps that also decode, and after accepted and other drafts."""
    folder, reference = make_chain_checkpoint(TEXT, tmp_path, repeats=repeats, rel_extent=128)
    engine = Compared(folder, reference, cuda_graph_mode=mode, **more)
    with engine.llm as llm:
        engine.run(prompts(1, 61, *unless_long([], [70]), 7), 30 if RUNS_LONG else 16)
        least, stats = 20 if RUNS_LONG else 10, llm.stats()
        assert engine.count > least and (stats.spec_decode_num_accepted_tokens > least) == repeats
        assert_idle(llm)


def test_drafts_after_prefix_hits_and_preemption(tmp_path: Path) -> None:
    """States of the head come back with those of the model, in texts that go on and after preemption."""
    folder, reference = make_chain_checkpoint(TEXT, tmp_path, repeats=True, rel_extent=128)
    engine = Compared(folder, reference, num_kv_pages=38)
    with engine.llm as llm:
        first = prompts(40, 33)
        texts = engine.run(first, 20)
        compared = engine.count
        second = [[*prompt, *text] for prompt, text in zip(first, texts, strict=True)]
        engine.run([*second, *prompts(44, seed=5)], 24)
        stats = llm.stats()
        assert stats.num_hit_tokens > 60 and stats.num_preemptions and engine.count > compared + 20
        assert_idle(llm)


@takes_long
def test_tokens_after_a_hit_that_branches(tmp_path: Path) -> None:
    """The last entries before the branch were computed with another next token, so a draft may differ, and no token."""
    folder = make_repeating_checkpoint(TEXT, tmp_path, head=True)
    settings: dict[str, Any] = SETTINGS | {"skip_tokenizer_init": True}
    params = SamplingParams(temperature=0.7, max_tokens=30, ignore_eos=True, seed=4, detokenize=False)
    (shared,) = prompts(64)
    texts = [[{"prompt_token_ids": shared + more}] for more in prompts(3, 5, 9)]
    with LLM(str(folder), **settings) as plain, LLM(str(folder), **settings, speculative_config=DRAFTS) as mtp:
        for text in texts:
            want, got = (llm.generate(text, params, use_tqdm=False)[0].outputs[0].token_ids for llm in (plain, mtp))
            assert list(got) == list(want)
        assert mtp.stats().num_hit_tokens and mtp.stats().spec_decode_num_draft_tokens


@pytest.mark.parametrize(("num_drafts", "deterministic"), [(3, False), *unless_long([], [(1, False), (2, True)])])
def test_tokens_are_those_without_drafts(num_drafts: int, deterministic: bool, tmp_path: Path) -> None:
    """With ``deterministic`` drafts are verified as short decodes, and steps follow one another."""
    folder = make_repeating_checkpoint(TEXT, tmp_path, head=True)
    settings = SETTINGS | ({"deterministic": True, "max_num_batched_tokens": 80} if deterministic else {})
    with LLM(str(folder), **settings) as plain:
        expected = case().run(plain)
    config = {"method": "mtp", "num_speculative_tokens": num_drafts}
    modes: dict[str, Any] = {"enable_overlap": True, "cuda_graph_mode": MODES[num_drafts], "speculative_config": config}
    with LLM(str(folder), **settings | modes) as mtp:
        assert mtp.config.verifies == deterministic
        check(mtp, expected, num_drafts)


def check(mtp: LLM, expected: list[Any], num_drafts: int) -> None:
    assert [done.token_ids for done in case().run(mtp)] == [done.token_ids for done in expected]
    stats = mtp.stats()
    assert stats.spec_decode_num_accepted_tokens > 0.1 * stats.spec_decode_num_draft_tokens > 0
    assert len(stats.spec_decode_num_accepted_tokens_per_pos) == num_drafts
    assert_idle(mtp)


@takes_long
@pytest.mark.parametrize("quantization", ["fp8", "int4"])
def test_quantised_while_loading(quantization: str, tmp_path: Path) -> None:
    """The layers of the head are quantised as those of the model."""
    folder = make_repeating_checkpoint(
        TEXT, tmp_path, head=True, hidden_size=64, intermediate_size=64, moe_intermediate_size=32, head_dim=16,
        swa_head_dim=16,
    )  # fmt: skip
    settings = SETTINGS | {"quantization": quantization}
    with LLM(str(folder), **settings) as plain:
        expected = case().run(plain)
    with LLM(str(folder), **settings, speculative_config=DRAFTS) as mtp:
        check(mtp, expected, 3)


@takes_long
def test_on_two_ranks(tmp_path: Path) -> None:
    folder = make_repeating_checkpoint(TEXT, tmp_path, head=True)
    with LLM(str(folder), **SETTINGS) as plain:
        expected = case().run(plain)
    with fork_ranks(), LLM(str(folder), **SETTINGS, speculative_config=DRAFTS, tensor_parallel_size=2) as mtp:
        check(mtp, expected, 3)


def test_drafts_behind_images(tmp_path: Path) -> None:
    """Embeddings of images have no norm before that of a layer of the head."""
    folder, reference = make_chain_checkpoint(INKLING, tmp_path, **overrides(INKLING))
    engine = Engine(
        folder, max_num_seqs=3, max_model_len=100, cpu_cache_gib=0.05, page_size=4, speculative_config=DRAFTS
    )
    empty = Prompt.of(INKLING)
    given = [empty.text(5).image(8, 8, 1).text(7), empty.text(12), empty.text(3).image(6, 4, 3).text(9)]
    requests = [engine.request(prompt, 14) for prompt in given]
    for request in requests:
        engine.core.add(request)
    while not all(request.is_finished for request in requests):
        engine.core.step()
    for prompt, request in zip(given, requests, strict=True):
        assert_reference(reference.model, prompt, request)
    assert engine.core.stats().spec_decode_num_drafts > 20


def test_at_most_a_draft_for_each_layer(tmp_path: Path) -> None:
    folder, _ = make_chain_checkpoint(TEXT, tmp_path / "three")
    for given, count in ((DRAFTS, 3), ({"method": "mtp"}, 2), ({"method": "mtp", "num_speculative_tokens": "auto"}, 2)):
        config = resolve(model=str(folder), speculative_config=given)
        assert config.num_drafts == config.model_config.mtp_depth == count
    with pytest.raises(ConfigError, match=r"num_speculative_tokens=4, but the head .* has 3 layers, .* at most 3"):
        resolve(model=str(folder), speculative_config=DRAFTS | {"num_speculative_tokens": 4})
    one, _ = make_chain_checkpoint(TEXT, tmp_path / "one", num_mtp_layers=1, mtp_local_layer_ids=None)
    assert resolve(model=str(one), speculative_config={"method": "mtp"}).num_drafts == 1
