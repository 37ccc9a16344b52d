"""``AsyncLLM`` in a training loop: pauses, sleep and new weights for an engine in another process."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine.test_async_llm import last
from tests.engine.test_weight_groups import described, free_port, train
from tests.engine.test_weight_updates import HYBRID, tensors_of
from tests.patience import GUARD_S
from tests.ranks import fork_ranks
from tests.tiny import make_checkpoint
from tests.whole import takes_long
from weft import AsyncLLM, SamplingParams
from weft.errors import ConfigError, UnavailableError

PROMPT = {"prompt_token_ids": [5, 6, 7, 8, 9, 10, 11]}
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    old, new = (make_checkpoint(HYBRID, tmp_path_factory.mktemp("hybrid"), seed) for seed in (0, 1))
    return old, new


def run(folder: Path, body: Callable[[AsyncLLM], Awaitable[None]], **settings: Any) -> None:
    async def main() -> None:
        given = {"device": "cpu", "max_num_seqs": 4, "max_model_len": 256, "skip_tokenizer_init": True} | settings
        async with AsyncLLM(str(folder), **given) as llm:
            await body(llm)

    asyncio.run(main())


async def tokens(llm: AsyncLLM) -> list[int]:
    return list((await last(llm.generate(PROMPT, GREEDY))).outputs[0].token_ids)


@takes_long
def test_pauses_sleep_and_new_weights(pair: tuple[Path, Path]) -> None:
    """In one engine: a start takes longer than all that is asked of it."""

    async def body(llm: AsyncLLM) -> None:
        await pauses_and_sleep(llm)
        await new_weights_of_this_process_and_of_a_folder(llm)

    async def new_weights_of_this_process_and_of_a_folder(llm: AsyncLLM) -> None:
        old = await tokens(llm)
        assert await llm.update_weights(tensors_of(pair[1]).items()) == 1
        new = await tokens(llm)
        assert new != old
        assert await llm.update_weights_from_path(pair[0], weight_version=7) == 7
        output = await last(llm.generate(PROMPT, GREEDY))
        assert output.outputs[0].token_ids == old and output.weight_version == 7
        with pytest.raises(ConfigError, match=r"1 unexpected: model\.foo"):
            await llm.update_weights({"model.foo": tensors_of(pair[1])["model.norm.weight"]})
        with pytest.raises(ConfigError, match="need an engine on a GPU"):
            await llm.update_weights_from_ipc(b"\x90")
        with pytest.raises(ConfigError, match="leave no room for the trainer"):
            await llm.init_weights_update_group("127.0.0.1", 1, 1, 1)
        with pytest.raises(ConfigError, match="Expected `int`, got `str`"):
            await llm.update_weights_from_distributed(["a"], ["float32"], [["x"]])  # type: ignore[list-item]
        await new_weights_of_a_group(llm, new)

    async def new_weights_of_a_group(llm: AsyncLLM, new: list[int]) -> None:
        port = free_port()
        with fork_ranks():
            trainer = multiprocessing.get_context("forkserver").Process(target=train, args=(pair[1], port, 2, 1))
            trainer.start()
        await llm.init_weights_update_group("127.0.0.1", port, 1, 2)
        assert await llm.update_weights_from_distributed(**described(pair[1])) == 8
        assert await tokens(llm) == new
        await llm.destroy_weights_update_group()
        trainer.join(GUARD_S)
        assert trainer.exitcode == 0

    async def pauses_and_sleep(llm: AsyncLLM) -> None:
        want = await tokens(llm)
        for mode in ("abort", "keep", "wait"):
            running = asyncio.create_task(last(llm.generate(PROMPT, LONG)))
            await asyncio.sleep(0.1)
            if mode == "wait":
                await llm.pause_generation(wait_for_inflight_requests=True)
                assert running.done() or (await running).finished
            else:
                await llm.pause_generation(mode=mode)
            later = asyncio.create_task(tokens(llm))
            await asyncio.sleep(0.1)
            assert await llm.is_paused() and not later.done()
            await llm.resume_generation()
            assert await later == want and not await llm.is_paused()
            assert (await running).outputs[0].finish_reason == ("abort" if mode == "abort" else "length")
        await llm.sleep()
        assert await llm.is_sleeping()
        with pytest.raises(UnavailableError, match="asleep"):
            await tokens(llm)
        await llm.wake_up(tags=["weights"])
        await llm.wake_up()
        assert not await llm.is_sleeping() and await tokens(llm) == want
        with pytest.raises(ConfigError, match="mode='now' is not valid"):
            await llm.pause_generation(mode="now")

    run(pair[0], body, enable_sleep_mode=True)
