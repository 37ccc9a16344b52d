"""Tiers below a GPU: restored KV and states have their former bytes, while other requests decode.

Layers and experts are few, weights are dummies. Races between the streams of steps and of copies only show here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.offload import content, equal, greedy, tokens
from tests.deterministic_cuts import CONFIGS, FEW, SMALL
from tests.offload.always import AlwaysRestore
from weft import LLM

pytestmark = pytest.mark.gpu

SETTINGS: dict[str, Any] = {
    "device": "cuda", "load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 1200, "max_num_seqs": 8,
    "num_kv_pages": 220, "kv_offloading_size": 1.0, "eviction_policy": "lru",
}  # fmt: skip
NUM_PROMPTS, ROUNDS = 8, 4


def folder_of(model: str, folder: Path) -> str:
    config = json.loads((CONFIGS / model / "config.json").read_text()) | SMALL | FEW[model]
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def open_engine(folder: str, **more: Any) -> LLM:
    llm = LLM(folder, **SETTINGS | more)
    restores = llm._core.scheduler.restores
    assert restores is not None
    restores.tier.costs = AlwaysRestore()
    restores._slice_pages = 9
    return llm


def prompts_of(llm: LLM) -> list[list[int]]:
    """With states prefixes end inside a page, without at the end of one."""
    length = 700 if llm._core.manager.spec.has_states else 705
    return [tokens(seed, length) for seed in range(NUM_PROMPTS)]


def serve(llm: LLM, prompt: list[int]) -> int:
    """Run a request among others. Returns the number of reused tokens."""
    name = llm.add_request({"prompt_token_ids": prompt}, greedy(1))
    while True:
        for output in llm.step():
            if output.request_id == name and output.finished:
                assert output.num_cached_tokens is not None
                return output.num_cached_tokens


def check_returns(folder: str, **more: Any) -> None:
    with open_engine(folder, **more) as llm:
        prompts, before = prompts_of(llm), []
        for prompt in prompts:
            serve(llm, prompt)
            before.append(content(llm, prompt))
        for index in range(2):
            llm.add_request({"prompt_token_ids": tokens(100 + index, 30)}, greedy(600), request_id=f"other{index}")
        for _ in range(ROUNDS):
            for prompt, expected in zip(prompts, before, strict=True):
                assert serve(llm, prompt) == len(prompt) - 1
                assert equal(content(llm, prompt), expected), "a restored prefix has other bytes than before"
        stats = llm.stats()
        assert stats.num_restores >= NUM_PROMPTS * (ROUNDS - 1) and not stats.num_failed_restores
        for name in list(llm._streams):
            llm.abort(name)
        while llm._core.has_work:
            llm.step()


def check_restart(folder: str, files: Path, **more: Any) -> None:
    with open_engine(folder, kv_offloading_dir=files, **more) as llm:
        prompts, before = prompts_of(llm), []
        for prompt in prompts:
            serve(llm, prompt)
            before.append(content(llm, prompt))
    with open_engine(folder, kv_offloading_dir=files, **more) as llm:
        for prompt, expected in zip(prompts, before, strict=True):
            assert serve(llm, prompt) == len(prompt) - 1
            assert equal(content(llm, prompt), expected), "files have other bytes than before"
        assert llm.stats().num_disk_loads


@pytest.mark.parametrize(
    ("model", "slots"),
    [("qwen3-next-12l", 12), ("qwen3-next-12l", 40), ("granite-4.0-h-tiny", 12), ("lfm2-8b-a1b", 12),
     ("gpt-oss-20b", None), ("qwen3-0.6b", None)],
)  # fmt: skip
def test_prefixes_return_while_others_decode(model: str, slots: int | None, tmp_path: Path) -> None:
    check_returns(folder_of(model, tmp_path), **({"num_state_slots": slots} if slots else {}))


@pytest.mark.parametrize("model", ["qwen3-next-12l", "qwen3-0.6b"])
def test_a_restart_reads_files(model: str, tmp_path: Path) -> None:
    check_restart(folder_of(model, tmp_path), tmp_path / "files")
