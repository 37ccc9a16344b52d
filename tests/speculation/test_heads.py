"""Every architecture with a head, one to four drafts: greedy tokens in float32 are those of decoding without drafts."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.engine.conftest import assert_idle
from tests.harness import leave_parts
from tests.late_device import LateDevice
from tests.shared import kept_open
from tests.speculation.conftest import Case, make_repeating_checkpoint
from tests.speculation.test_ngram import Steps
from tests.whole import unless_long
from tests.x_matrix import runner_of
from weft import LLM, CompletionOutput, SamplingParams
from weft.config.checkpoint import read_checkpoint_config

HEADS = [
    "Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForCausalLM",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
    "Qwen4ExpForCausalLM",
    "Glm5NextForConditionalGeneration",
    "BailingHybridForCausalLM",
]
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "max_num_seqs": 3,
    "max_num_batched_tokens": 40,
    "page_size": 4,
    "max_model_len": 128,
    "num_kv_pages": 120,
    "language_model_only": True,
}
MODES = {1: "FULL_DECODE_ONLY", 2: "NONE", 3: "NONE", 4: "FULL_DECODE_ONLY"}
"""By number of drafts."""
IN_CI = [
    ("Qwen3NextForCausalLM", 1),
    ("Qwen3_5ForConditionalGeneration", 4),
]
"""Heads and numbers of drafts of ``make test``. ``tests/models/test_mtp.py`` has the others' drafts."""


def case() -> Case:
    rng = random.Random(4)
    prompts = [[rng.randrange(3, 200) for _ in range(n)] for n in (1, 30, 61, 7)]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, seed=n) for n in (40, 23, 2, 31)]
    return Case(prompts, params)


Expected = tuple[Path, list[CompletionOutput]]


@pytest.fixture(scope="module")
def expected_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Expected]]:
    @contextmanager
    def opening(arch: str) -> Iterator[Expected]:
        folder = make_repeating_checkpoint(arch, tmp_path_factory.mktemp("head"), head=True)
        with LLM(str(folder), **SETTINGS) as plain:
            yield folder, case().run(plain)

    with kept_open(opening) as expected_of:
        yield expected_of


@pytest.fixture
def expected(request: pytest.FixtureRequest, expected_of: Callable[[str], Expected]) -> Expected:
    """A checkpoint, and its texts without drafts."""
    return expected_of(request.param)


@pytest.mark.parametrize(("expected", "num_drafts"), unless_long(IN_CI, product(HEADS, MODES)), indirect=["expected"])
def test_tokens_are_those_without_drafts(expected: Expected, num_drafts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With sums left to the norms that follow, as on a GPU."""
    left = leave_parts(monkeypatch)
    check_head(*expected, num_drafts, MODES[num_drafts])
    assert bool(left) == (read_checkpoint_config(expected[0]).streams is None), "streams take whole sums"


def check_head(folder: Path, expected: list[CompletionOutput], num_drafts: int, mode: str, **more: Any) -> None:
    config = {"method": "mtp", "num_speculative_tokens": num_drafts}
    overlap: dict[str, Any] = {"enable_overlap": True, "cuda_graph_mode": mode, "speculative_config": config}
    with LLM(str(folder), **SETTINGS | overlap | more) as mtp:
        if mtp.config.device == "cpu" and mtp.config.tensor_parallel_size == 1:
            LateDevice(mtp)
        steps = Steps(mtp)
        assert [done.token_ids for done in case().run(mtp)] == [done.token_ids for done in expected]
        stats = mtp.stats()
        assert stats.spec_decode_num_accepted_tokens > 0.1 * stats.spec_decode_num_draft_tokens > 0
        assert len(stats.spec_decode_num_accepted_tokens_per_pos) == num_drafts
        assert mtp.config.verifies and steps.followed > 3
        graphs = runner_of(mtp).graphs.verification
        assert graphs is None if mode == "NONE" else graphs is not None and graphs.counters.replays
        assert_idle(mtp)
