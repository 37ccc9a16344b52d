"""Sleep and wake: memory is really given back, graphs stay valid, and a woken engine is as one after a start."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.test_weight_updates import FULL, HYBRID, PIECES, PROMPTS, answers, engine, finish, opened, tensors_of
from tests.ranks import fork_ranks
from tests.tiny import make_checkpoint
from tests.whole import unless_long
from tests.x_matrix import runner_of
from weft import LLM
from weft.errors import ConfigError, UnavailableError

WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "full": FULL,
    "pieces": PIECES,
    "int4": {"quantization": "int4"},
    "fp8": {"quantization": "fp8"},
    "ranks": {"tensor_parallel_size": 2},
    "tier": {"kv_offloading_size": 0.05},
}


@pytest.fixture(autouse=True)
def _forks() -> Iterator[None]:
    with fork_ranks():
        yield


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    widths: dict[str, Any] = {"hidden_size": 64, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
    old, new = (make_checkpoint(HYBRID, tmp_path_factory.mktemp("hybrid"), seed, **widths) for seed in (0, 1))
    return old, new


def sleepy(folder: Path, **settings: Any) -> LLM:
    return engine(folder, enable_sleep_mode=True, **settings)


def resident_bytes() -> int:
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS")]
    return int(line.split()[1]) * 1024


def assert_as_after_a_start(llm: LLM) -> None:
    manager = llm._core.manager
    manager.check()
    assert manager.pages.num_free == manager.pages.capacity and manager.slots.num_free == manager.slots.capacity
    for tensors in runner_of(llm).caches.values():
        assert not any(tensor.any() for tensor in tensors.values()), "a page or a slot holds something"


@pytest.mark.parametrize("way", unless_long(["full", "fp8", "tier"], WAYS))
def test_a_woken_engine_answers_as_before(way: str, pair: tuple[Path, Path]) -> None:
    with sleepy(pair[1], **WAYS[way]) as fresh:
        new = answers(fresh)
    with sleepy(pair[0], **WAYS[way]) as llm:
        before = answers(llm)
        llm.sleep()
        assert llm.is_sleeping()
        llm.wake_up()
        assert not llm.is_sleeping()
        assert_as_after_a_start(llm)
        assert answers(llm) == before and llm.weight_version == 0
        llm.sleep(level=2)
        llm.wake_up(["weights"])
        assert llm.is_sleeping()
        llm.update_weights(tensors_of(pair[1]))
        llm.wake_up(["kv_cache"])
        assert_as_after_a_start(llm)
        assert answers(llm) == new
        llm._core.scheduler.check()


def test_memory_is_given_back(tmp_path: Path) -> None:
    """The system's own count, with weights of 40 MB and a cache that is full."""
    folder = make_checkpoint("Qwen3ForCausalLM", tmp_path, hidden_size=256, vocab_size=20_000)
    with sleepy(folder, cpu_cache_gib=0.1) as llm:
        weights = sum(p.nbytes for p in runner_of(llm).model.parameters())
        for tensors in runner_of(llm).caches.values():
            for tensor in tensors.values():
                tensor.fill_(1)
        caches = sum(t.nbytes for tensors in runner_of(llm).caches.values() for t in tensors.values())
        awake = resident_bytes()
        llm.sleep(level=2)
        asleep = resident_bytes()
        assert awake - asleep > 0.95 * (weights + caches) > 4e7
        llm.wake_up()
        assert_as_after_a_start(llm)


def test_requests_and_updates_while_asleep(pair: tuple[Path, Path]) -> None:
    with sleepy(pair[0]) as llm:
        llm.sleep()
        for call in (lambda: llm.generate([1], use_tqdm=False), lambda: llm.add_request([1])):
            with pytest.raises(UnavailableError, match=r"asleep \(weights, kv_cache given back\); call wake_up"):
                call()
        with pytest.raises(UnavailableError, match="weights are asleep; call wake_up"):
            llm.update_weights(tensors_of(pair[1]))
        with pytest.raises(UnavailableError, match="asleep already"):
            llm.sleep()
        with pytest.raises(ConfigError, match=r"tags .*'graphs'.* are not valid"):
            llm.wake_up(["graphs"])
        llm.wake_up()
        llm.wake_up()
        llm.sleep(2)
        llm.wake_up()
        with pytest.raises(UnavailableError, match=r"level=2\) has dropped the weights; update all of them"):
            llm.generate(PROMPTS[0], use_tqdm=False)
        for level in (0, 3, "1"):
            with pytest.raises(ConfigError, match=r"level=.* is not valid"):
                llm.sleep(level)  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", ["wait", "abort", "keep"])
def test_open_requests(mode: str, pair: tuple[Path, Path]) -> None:
    """With "keep" they go on after the engine is awake, and give the tokens that they give without a sleep."""
    with sleepy(pair[0]) as llm:
        first = opened(llm)
        want = finish(llm)
        ids = opened(llm)
        llm.sleep(mode=mode)
        assert mode != "keep" or not llm.step()
        llm.wake_up()
        done = finish(llm)
        reasons = {o.outputs[0].finish_reason for o in done.values()}
        assert reasons == {"abort"} if mode == "abort" else reasons == {"length"}
        if mode != "abort":
            assert [done[i].outputs[0].token_ids for i in ids] == [want[i].outputs[0].token_ids for i in first]


def test_an_engine_without_the_setting(pair: tuple[Path, Path]) -> None:
    with engine(pair[0]) as llm, pytest.raises(ConfigError, match="made with enable_sleep_mode=True"):
        llm.sleep()
