"""``AsyncLLM``: one engine process, streams in one event loop; the bundled model."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.patience import GUARD_S
from tests.whole import takes_long
from weft import LLM, AsyncLLM, RequestOutput, SamplingParams, StructuredOutputsParams
from weft.errors import ConfigError, EngineDeadError, RequestError
from weft.text.tokenizer import Tokenizer

SETTINGS: dict[str, Any] = {"device": "cpu", "max_num_seqs": 4, "max_model_len": 256}
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
ENDLESS = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
CHAT = [{"role": "user", "content": [{"type": "text", "text": "What is 12 + 30?"}]}]


ONE = SamplingParams(max_tokens=1)
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
BEGUN = [*CHAT, {"role": "assistant", "content": "It is"}]
CHATS: list[tuple[list[Any], dict[str, Any]]] = [
    (CHAT, {}),
    (CHAT, {"tools": TOOLS}),
    (CHAT, {"add_generation_prompt": False}),
    (CHAT, {"chat_template_kwargs": {"enable_thinking": False}}),
    (BEGUN, {"add_generation_prompt": False, "continue_final_message": True}),
]
"""Each with another prompt."""


async def last(stream: Any) -> RequestOutput:
    output = None
    async for output in stream:  # noqa: B007
        pass
    assert output is not None and output.finished
    return output


@pytest.mark.parametrize("wrong", [{"sampling_params": {"n": 1}}, {"request_id": ""}, {"priority": "high"}])
def test_a_call_of_wrong_types_is_refused_before_anything_starts(wrong: dict[str, Any]) -> None:
    """In the words of ``LLM``."""
    with pytest.raises(RequestError, match=next(iter(wrong))):
        asyncio.run(last(AsyncLLM().generate("12 + 30:", **wrong)))


def test_the_same_as_llm() -> None:
    with LLM(**SETTINGS) as llm:
        want = llm.generate(["12 + 30:", "63 x 7:"], GREEDY, use_tqdm=False)
        want += llm.chat(CHAT, GREEDY, use_tqdm=False)
        rendered = [llm.render_chat(messages, **options) for messages, options in CHATS]

    async def main() -> None:
        async with AsyncLLM(**SETTINGS) as llm:
            await ids_are_the_callers_own(llm)
            await every_argument_counts(llm, rendered)
            await streams_grow(llm)
            found = await asyncio.gather(
                last(llm.generate("12 + 30:", GREEDY)),
                last(llm.generate("63 x 7:", GREEDY)),
                last(llm.chat(CHAT, GREEDY)),
            )
            for one, other in zip(found, want, strict=True):
                assert (one.prompt, one.prompt_token_ids) == (other.prompt, other.prompt_token_ids)
                assert one.outputs[0].token_ids == other.outputs[0].token_ids
                assert one.outputs[0].text == other.outputs[0].text
            assert llm.get_tokenizer().encode("a") and llm.config is not None
            await constrained(llm)
            await aborted(llm)
            await forgets(llm)
            await refused(llm)
        with pytest.raises(EngineDeadError, match="was shut down; make a new AsyncLLM"):
            await last(llm.generate("a"))

    asyncio.run(main())


async def ids_are_the_callers_own(llm: AsyncLLM) -> None:
    """Callers' ids that look like Weft's ids do not collide. An id is free again as soon as its request is aborted."""
    named = [llm.generate("12", ENDLESS, request_id=name) for name in ("request-1", "request-2", "again")]
    for stream in named:
        await anext(stream)
    assert (await last(llm.generate("12", GREEDY))).request_id not in ("request-1", "request-2")
    assert await llm.abort("again")
    second = llm.generate("12", ENDLESS, request_id="again")
    await anext(second)
    await last(named[2])
    for name in ("request-1", "request-2", "again"):
        assert await llm.abort(name)
    for stream in (*named[:2], second):
        assert (await last(stream)).outputs[0].finish_reason == "abort"


async def every_argument_counts(llm: AsyncLLM, rendered: list[dict[str, Any]]) -> None:
    assert llm._engine is not None
    submitted, submit = list[tuple[Any, ...]](), llm._engine.submit

    def noted(name: str, prompts: list[Any], params: SamplingParams, *, priority: int) -> Any:
        submitted.append((name, priority, prompts[0].token_ids, prompts[0].checkpoint_positions))
        return submit(name, prompts, params, priority=priority)

    llm._engine.submit = noted  # type: ignore[assignment, method-assign]
    for number, (messages, options) in enumerate(CHATS):
        await last(llm.chat(messages, ONE, f"chat {number}", priority=number, **options))
    await last(llm.generate("12", ONE, priority=-1))
    llm._engine.submit = submit  # type: ignore[method-assign]
    *chats, (_, priority, *_) = submitted
    assert priority == -1
    assert chats == [
        (f"chat {number}", number, prompt["prompt_token_ids"], prompt.get("checkpoint_positions", []))
        for number, prompt in enumerate(rendered)
    ]


async def forgets(llm: AsyncLLM) -> None:
    """Resetting the prefix cache forgets cached prompts, but is refused while a request runs."""
    again = SamplingParams(temperature=0.0, max_tokens=2)
    assert (await last(llm.generate("12 + 30:", again))).num_cached_tokens > 0
    stream = llm.generate("on and on", ENDLESS, request_id="long")
    await anext(stream)
    assert not await llm.reset_prefix_cache()
    await llm.abort("long")
    await last(stream)
    assert await llm.reset_prefix_cache()
    assert (await last(llm.generate("12 + 30:", again))).num_cached_tokens == 0


async def streams_grow(llm: AsyncLLM) -> None:
    texts = [output.outputs[0].text async for output in llm.generate("12 + 30:", GREEDY)]
    assert all(b.startswith(a) for a, b in itertools.pairwise(texts))


async def constrained(llm: AsyncLLM) -> None:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["yes"]))
    assert (await last(llm.generate("Is 2 even?", params))).outputs[0].text == "yes"


async def aborted(llm: AsyncLLM) -> None:
    assert llm._engine is not None
    output = None
    async for output in llm.generate("12", ENDLESS, request_id="a"):
        assert await llm.abort("a") == (not output.finished)
    assert output is not None and output.finished
    assert output.outputs[0].finish_reason == "abort" and output.outputs[0].token_ids
    assert not await llm.abort("a")
    stream = llm.generate("12", ENDLESS)
    async for _ in stream:
        break
    await stream.aclose()  # type: ignore[attr-defined]
    assert llm._engine.num_open == len(llm._engine._owners) == 0


async def refused(llm: AsyncLLM) -> None:
    processors = SamplingParams(logits_processors=[len])
    for arguments, message in (
        (("",), "the prompt is empty"),
        (("a", processors), "need the engine in this process; use LLM"),
        (("a", {"n": 2}), "sampling_params is a dict; give SamplingParams"),
        (("a", GREEDY, 5), "request_id=5 is not"),
        # What cannot be sent would leave the request, and those sent with it, without an answer, or end the engine.
        (("a", GREEDY, "\ud800"), "not valid Unicode"),
        (({"prompt": "a", "cache_salt": "\ud800"}, GREEDY), "not valid Unicode"),
        (("a", GREEDY, None, 2**64), "priority=18446744073709551616 is not a 64-bit integer"),
        (("a", GREEDY, None, "high"), "priority='high' is not a 64-bit integer"),
    ):
        with pytest.raises(RequestError, match=message):
            await last(llm.generate(*arguments))
    with pytest.raises(RequestError, match="has no role"):
        await last(llm.chat([{"content": "a"}]))


def test_a_start_that_fails(tmp_path: Path) -> None:
    async def main() -> None:
        for settings, message in (({"max_num_seqz": 3}, "unknown setting"), ({"model": str(tmp_path)}, "config.json")):
            with pytest.raises(ConfigError, match=message):
                await AsyncLLM(**settings).start()

    asyncio.run(main())


@takes_long
def test_calls_that_come_before_the_start_is_over_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them is cancelled while the tokenizer loads, which happens once."""
    loads, load, began = list[Path](), Tokenizer.load, threading.Event()

    def counted(path: Path) -> Tokenizer:
        loads.append(path)
        began.set()
        return load(path)

    monkeypatch.setattr(Tokenizer, "load", counted)

    async def main() -> None:
        llm = AsyncLLM(**SETTINGS)
        calls = [asyncio.create_task(last(llm.generate("12 + 30:", GREEDY))) for _ in range(4)]
        while not began.is_set():
            await asyncio.sleep(0.01)
        calls[0].cancel()
        outputs = await asyncio.gather(*calls, return_exceptions=True)
        await llm.shutdown()
        assert isinstance(outputs[0], asyncio.CancelledError) and len(loads) == 1
        assert [output.outputs[0].finish_reason for output in outputs[1:]] == ["length"] * 3  # type: ignore[union-attr]

    asyncio.run(main())


def test_a_start_in_another_thread_is_refused_every_time() -> None:
    async def main() -> None:
        llm = AsyncLLM(**SETTINGS)
        for _ in range(2):
            with pytest.raises(ConfigError, match="must be started in the main thread"):
                await asyncio.wait_for(llm.start(), GUARD_S)

    with ThreadPoolExecutor(1) as threads:
        threads.submit(asyncio.run, main()).result()


@takes_long
def test_an_engine_that_dies() -> None:
    async def main() -> None:
        llm = await AsyncLLM(**SETTINGS).start()
        assert llm._process is not None
        with pytest.raises(EngineDeadError, match="ended with status -9"):
            async for _ in llm.generate("12", ENDLESS):
                os.kill(llm._process.pid, signal.SIGKILL)
        await llm.shutdown()

    asyncio.run(main())
