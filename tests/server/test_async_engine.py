"""Streams over a fake link: text and stop strings, aborts, slow readers, and the engine's death."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec.structs import replace

from tests.patience import GUARD_S
from tests.server.fake_engine import BREAK, CUT, FakeCore
from tests.tiny_tokenizer import save_sentencepiece_tokenizer
from weft.config import resolve
from weft.engine import wire
from weft.engine.async_engine import AsyncEngine
from weft.engine.channel import Address, EngineStart
from weft.engine.input_processor import InputProcessor
from weft.engine.process import MAX_BROKEN_STEPS, PREFIXES_EVERY_S, EngineLoop, start_core
from weft.engine.response_stream import PromptDelta, ResponseStream
from weft.errors import EngineDeadError, RequestError, UnavailableError
from weft.outputs import CacheReport
from weft.request import RequestSpec
from weft.sampling_params import SamplingParams
from weft.stats import EngineStats
from weft.text.tokenizer import Tokenizer

TEXT = "Grüße, 東京 😀 and so on"


@pytest.fixture(scope="module")
def inputs() -> InputProcessor:
    config = resolve(device="cpu")
    return InputProcessor(config, Tokenizer.load(config.tokenizer_path), 4096)


class Link:
    """An engine in this process that runs when it is told to; messages cross as bytes."""

    def __init__(self) -> None:
        self.core = FakeCore(per_step=1)
        self.engine: AsyncEngine | None = None
        self.inbox: list[wire.ToEngine] = []
        self.loop = EngineLoop(self.core, self)  # type: ignore[arg-type]

    def send(self, message: Any) -> None:
        if isinstance(message, wire.Outputs | wire.Inspected):
            assert self.engine is not None
            message = wire.decode_from_engine(wire.encode(message))
            self.engine.receive(message) if isinstance(message, wire.Outputs) else self.engine.on_inspected(message)
        else:
            self.inbox += wire.decode_to_engine(wire.encode_to_engine([message]))

    def run(self, steps: int = 1) -> None:
        for _ in range(steps):
            messages, self.inbox = self.inbox, []
            for message in messages:
                self.loop._handle(message)  # type: ignore[arg-type]
            if self.core.has_work:
                self.loop._step()


Body = Callable[[AsyncEngine, Link], Awaitable[None]]


def run(inputs: InputProcessor, body: Body) -> None:
    async def main() -> None:
        link = Link()
        link.engine = AsyncEngine(link, inputs, inputs._tokenizer)
        await asyncio.wait_for(body(link.engine, link), GUARD_S)

    asyncio.run(main())


def submit(engine: AsyncEngine, text: str = TEXT, name: str = "r", **params: Any) -> ResponseStream:
    return engine.submit(name, [engine.inputs.prepare_prompt(text)], SamplingParams(**params))


def test_what_came_before_the_reader_is_read_without_a_wait(inputs: InputProcessor) -> None:
    async def body(engine: AsyncEngine, link: Link) -> None:
        stream = submit(engine, max_tokens=5, ignore_eos=True)
        link.run(2)
        await asyncio.sleep(0.001)  # nobody waits when it is announced
        ((_, delta),) = await anext(stream)
        assert len(delta.token_ids) == 2 and delta.finish_reason is None
        link.run(3)
        await asyncio.sleep(0.001)
        (deltas,) = [deltas async for deltas in stream]
        assert [(len(delta.token_ids), delta.finish_reason) for _, delta in deltas] == [(3, "length")]

    run(inputs, body)


def test_the_engine_tells_what_requests_can_get_of_it() -> None:
    settings = {"device": "cpu", "num_kv_pages": 21, "num_state_slots": 12, "page_size": 8, "load_format": "dummy"}
    start = EngineStart(Address("", ""), "", 0, settings | {"max_num_seqs": 3, "max_model_len": 64}, False, False)
    told: list[Any] = []
    core, capacity = start_core(start, SimpleNamespace(send=told.append))  # type: ignore[arg-type]
    stats = core.stats()
    core.shutdown()
    assert capacity == wire.Capacity(max_model_len=64, max_num_seqs=3, num_pages=20, page_size=8, num_slots=11)
    assert (stats.num_free_pages, stats.num_free_slots) == (20, 11), "all are free"
    assert [type(message) for message in told] == [wire.Configured, wire.Stage, wire.Stage]


def test_parameters_are_resolved_once_for_all_prompts_of_a_call(
    inputs: InputProcessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokenizing the bad words again for each of a thousand prompts would keep the event loop for seconds."""
    encoded: list[str] = []
    encode = Tokenizer.encode

    def noted(self: Tokenizer, text: str, **named: Any) -> list[int]:
        encoded.append(text)
        return encode(self, text, **named)

    async def body(engine: AsyncEngine, link: Link) -> None:
        prompts = [inputs.prepare_prompt(TEXT) for _ in range(5)]
        monkeypatch.setattr(Tokenizer, "encode", noted)
        stream = engine.submit("r", prompts, SamplingParams(bad_words=["word"], max_tokens=2))
        assert encoded == ["word", " word"]
        assert len({id(request) for request in stream.requests}) == 5
        assert len({request.sampling.seed for request in stream.requests}) == 5

    run(inputs, body)


def test_every_figure_of_a_request_crosses_to_the_engine_and_back(inputs: InputProcessor) -> None:
    async def body(engine: AsyncEngine, link: Link) -> None:
        prompt = inputs.prepare_prompt({"prompt": TEXT, "cache_salt": "salt", "checkpoint_positions": [2]})
        params = SamplingParams(max_tokens=2, ignore_eos=True, stop_token_ids=[1], seed=3, min_p=0.125)
        stream = engine.submit("r", [prompt], params, priority=CUT, grammar="start: /a/", caller="key")
        messages, link.inbox = link.inbox, []
        for message in messages:
            link.loop._handle(message)  # type: ignore[arg-type]
        (ours,), (theirs,) = stream.requests, link.core.requests.values()
        assert replace(theirs.spec, arrival=ours.arrival) == ours.spec
        assert (theirs.caller, theirs.sampling.grammar, theirs.priority) == ("key", "start: /a/", CUT)
        figures = {
            "num_cached_tokens": 3, "num_preemptions": 4, "num_draft_tokens": 5, "num_accepted_tokens": 6,
            "no_drafts_because": "why", "cache_report": CacheReport(20, 16, None, 16, 0, ""),
        }  # fmt: skip
        for name, value in figures.items():
            setattr(theirs, name, value)
        theirs.times.first_scheduled = ours.times.arrival + 2
        theirs.times.first_token = ours.times.arrival + 5
        link.run()
        assert {name: getattr(ours, name) for name in figures} == figures and ours.finish_reason is None
        theirs.stop_reason = 1
        link.run()
        assert ours.output_token_ids == theirs.output_token_ids and len(ours.output_token_ids) == 2
        assert (ours.finish_reason, ours.stop_reason) == (theirs.finish_reason, 1)
        assert {name: getattr(ours, name) for name in figures} == figures
        told, sent = ours.times, theirs.times
        assert (told.first_scheduled, told.first_token, told.finished) == (
            sent.first_scheduled, sent.first_token, sent.finished,
        )  # fmt: skip
        (result,) = await stream.results()
        metrics = result.metrics
        assert (metrics.time_in_queue, metrics.time_to_first_token) == (pytest.approx(2), pytest.approx(5))
        assert metrics.e2e_latency == (sent.finished or 0) - ours.times.arrival
        assert (metrics.num_preemptions, metrics.num_draft_tokens, metrics.num_accepted_tokens) == (4, 5, 6)
        assert (metrics.no_drafts_because, result.num_cached_tokens, result.cache_report) == (
            "why", 3, figures["cache_report"],
        )  # fmt: skip

    run(inputs, body)


@pytest.mark.parametrize("refuses", [False, True])
def test_what_is_no_end_is_pushed_to_a_reader_that_waits(inputs: InputProcessor, refuses: bool) -> None:
    async def body(engine: AsyncEngine, link: Link) -> None:
        pushed, read = [], []

        def push(deltas: list[PromptDelta]) -> bool:
            is_taken = not refuses or len(pushed) % 2 == 0
            pushed.append(deltas if is_taken else [])
            return is_taken

        async def reader() -> None:
            async for deltas in stream:
                read.append(deltas)
                stream.push = push

        stream = submit(engine, max_tokens=12, ignore_eos=True)
        done = asyncio.create_task(reader())
        await asyncio.sleep(0)
        while not done.done():
            num_pushed = len(pushed)
            link.run()
            for _ in range(3):
                await asyncio.sleep(0)
            assert len(pushed) - num_pushed <= 1, "once for a step"
        assert all(delta.finish_reason is None for deltas in pushed for _, delta in deltas)
        assert read[-1][-1][1].finish_reason == "length" and len(pushed) == 10
        assert len(read) == (7 if refuses else 2)
        tokens = [token for deltas in pushed + read for _, delta in deltas for token in delta.token_ids]
        assert sorted(tokens) == sorted(stream.requests[0].output_token_ids)

    run(inputs, body)


def test_the_reader_gets_what_a_push_raises(inputs: InputProcessor) -> None:
    async def body(engine: AsyncEngine, link: Link) -> None:
        def push(deltas: list[PromptDelta]) -> bool:
            raise ValueError("no")

        stream = submit(engine)
        other, stream.push = submit(engine, name="other"), push
        reading = asyncio.create_task(_collect(stream))
        for _ in range(3):
            link.run()
            await asyncio.sleep(0)
        with pytest.raises(ValueError, match="no"):
            await reading
        link.run(1000)
        assert "".join(delta.text for _, delta in await _collect(other)) == TEXT

    run(inputs, body)


@pytest.mark.parametrize("stop", [None, "東", ["京 😀", "zz"], ["G"]])
@pytest.mark.parametrize("burst", [1, 3, 1000])
def test_deltas_add_up_to_the_result(inputs: InputProcessor, stop: Any, burst: int) -> None:
    async def body(engine: AsyncEngine, link: Link) -> None:
        stream, text, tokens = submit(engine, stop=stop, n=2), "", []
        done = asyncio.create_task(_collect(stream))
        while not done.done():
            link.run(burst)
            await asyncio.sleep(0)
        for _, delta in done.result():
            if delta.index == 1:
                text, tokens = text + delta.text, tokens + delta.token_ids
        result = stream.snapshot()[0]
        output, latency = result.outputs[1], result.metrics.e2e_latency
        found = [s for s in ([stop] if isinstance(stop, str) else stop or []) if s in TEXT]
        assert text == output.text == (TEXT.split(found[0])[0] if found else TEXT)
        assert tokens == output.token_ids and output.finish_reason == "stop"
        assert output.stop_reason == (found[0] if found else None) and latency is not None and latency > 0
        link.run()
        assert not link.core.requests and len(engine._owners) == 0
        stream.close()
        assert engine.num_open == 0

    run(inputs, body)


@pytest.mark.parametrize("stop", [None, "zz"])
def test_a_completion_whose_tokens_give_no_text_ends_alone(
    inputs: InputProcessor, stop: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(engine: AsyncEngine, link: Link) -> None:
        stream = submit(engine, n=2, stop=stop)

        def broken(token_ids: Any) -> str:
            raise OverflowError("no such token")

        completion = stream.outputs[0]._completions[1]
        monkeypatch.setattr(completion.detokenizer, "extend", broken)
        done = asyncio.create_task(_collect(stream))
        while not done.done():
            link.run()
            await asyncio.sleep(0)
        good, bad = stream.snapshot()[0].outputs
        assert (good.text, good.finish_reason) == (TEXT, "stop") and bad.finish_reason == "error"
        link.run()
        assert not link.core.requests and len(engine._owners) == 0 and link.core.num_aborts == 1

    run(inputs, body)


async def _collect(stream: ResponseStream) -> list[Any]:
    return [delta async for deltas in stream for delta in deltas]


def test_the_text_continues_the_prompt(tmp_path: Path) -> None:
    """With a tokenizer like Llama 2's the first word keeps its space."""
    save_sentencepiece_tokenizer(tmp_path)
    llama = InputProcessor(resolve(device="cpu"), Tokenizer.load(tmp_path), 4096)

    async def body(engine: AsyncEngine, link: Link) -> None:
        stream = submit(engine, "hello world", n=2, max_tokens=3, ignore_eos=True)  # the engine repeats the prompt
        link.run(4)
        assert [o.text for o in (await stream.results())[0].outputs] == [" hello world"] * 2
        stream.close()

    run(llama, body)


def test_a_reader_that_leaves_aborts_what_runs(inputs: InputProcessor) -> None:
    async def body(engine: AsyncEngine, link: Link) -> None:
        async with submit(engine) as stream:
            link.run(2)
            assert len(link.core.requests) == engine.stats.num_running == 1
        assert link.inbox == [wire.FinishRequests([stream.requests[0].request_id])]
        link.run()
        assert not link.core.requests and link.core.num_aborts == 1
        assert engine.stats.num_running == 0, "though no step follows"
        stream.close()
        assert not link.inbox

    run(inputs, body)


def test_what_a_call_says_reaches_the_engine(inputs: InputProcessor) -> None:
    async def body(engine: AsyncEngine, link: Link) -> None:
        said = {"priority": 3, "grammar": "start: 'a'", "caller": "a key"}
        engine.submit("r", [inputs.prepare_prompt(TEXT)], SamplingParams(n=2), **said)  # type: ignore[arg-type]
        for spec in link.inbox:
            assert isinstance(spec, RequestSpec)
            assert {"priority": spec.priority, "grammar": spec.sampling.grammar, "caller": spec.caller} == said

    run(inputs, body)


def test_a_slow_reader_gets_everything_at_once(inputs: InputProcessor) -> None:
    async def body(engine: AsyncEngine, link: Link) -> None:
        stream = submit(engine)
        link.run(1000)
        collected = await _collect(stream)
        assert len(collected) == 1 and collected[0][1].text == TEXT

    run(inputs, body)


def test_a_request_that_cannot_run_ends_as_unavailable(inputs: InputProcessor) -> None:
    """After the tokens that it has."""

    async def body(engine: AsyncEngine, link: Link) -> None:
        stream, other = submit(engine), submit(engine, "ab", name="s")
        link.run()
        update = wire.Update(stream.requests[0].request_id, [], "unavailable", "the weights are lost")
        link.send(wire.Outputs([update], link.core.stats()))
        assert len(await anext(stream)) == 1
        with pytest.raises(UnavailableError, match="the weights are lost"):
            await anext(stream)
        link.run(1000)
        assert (await other.results())[0].finished

    run(inputs, body)


@pytest.mark.parametrize(
    ("reason", "why", "told"),
    [("error", "asleep", "unavailable"), ("error", None, "error"), ("error", "no token left", "error"),
     ("length", None, "length"), (None, None, None)],
)  # fmt: skip
def test_ends_without_an_engine_are_told_apart(reason: Any, why: str | None, told: str | None) -> None:
    loop = object.__new__(EngineLoop)
    core = SimpleNamespace(rollouts=SimpleNamespace(unavailable="asleep"))
    loop._core, loop._controls = cast(Any, core), cast(Any, object())
    assert loop._finish_reason(cast(Any, SimpleNamespace(finish_reason=reason, stop_reason=why))) == told


def test_the_death_of_the_engine_ends_every_stream(inputs: InputProcessor) -> None:
    async def body(engine: AsyncEngine, link: Link) -> None:
        waiting, ended = submit(engine), submit(engine, "ab", name="s", max_tokens=1)
        readers = [asyncio.create_task(_collect(waiting))]
        await asyncio.sleep(0)
        link.run()
        readers += [asyncio.create_task(wait) for wait in (engine.inspect(), engine.reset_prefix_cache())]
        await asyncio.sleep(0)
        engine.die("it was killed")
        for reader in readers:
            with pytest.raises(EngineDeadError, match="killed"):
                await reader
        with pytest.raises(EngineDeadError):
            await waiting.results()
        assert (await ended.results())[0].finished  # it had all its tokens before
        assert len(await _collect(ended)) == 1
        with pytest.raises(EngineDeadError):
            submit(engine, name="t")
        link.inbox.clear()
        waiting.close()
        assert not link.inbox

    run(inputs, body)


@pytest.mark.parametrize("where", ["engine", "server"])
def test_a_request_that_breaks_ends_alone(inputs: InputProcessor, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(engine: AsyncEngine, link: Link) -> None:
        good, bad = submit(engine, name="good"), submit(engine, name="bad")
        add = link.core.add

        def refuse(request: Any) -> None:
            if request.request_id.startswith("bad"):
                raise AssertionError("broken")
            add(request)

        if where == "engine":
            monkeypatch.setattr(link.core, "add", refuse)
        else:
            monkeypatch.setattr(bad.outputs[0], "take", refuse)
        link.run(100)
        assert (await bad.results())[0].outputs[0].finish_reason == "error"
        assert (await good.results())[0].outputs[0].text == TEXT
        assert len(engine._owners) == 0 and not link.core.requests and not link.loop._sent

    run(inputs, body)


def test_a_stream_that_is_closed_again_ends_no_other_one_of_its_id(inputs: InputProcessor) -> None:
    async def body(engine: AsyncEngine, link: Link) -> None:
        first = submit(engine)
        first.close()
        second = submit(engine)
        first.close()
        assert engine.stream("r") is second and engine.num_open == 1
        link.run(100)
        assert (await second.results())[0].outputs[0].finish_reason == "stop"

    run(inputs, body)


def test_resets_are_answered_in_their_order_also_where_nobody_waits(inputs: InputProcessor) -> None:
    async def body(engine: AsyncEngine, link: Link) -> None:
        first, gone, third = (asyncio.create_task(engine.reset_prefix_cache()) for _ in range(3))
        look = asyncio.create_task(engine.inspect())
        await asyncio.sleep(0)
        assert link.inbox == [wire.ResetPrefixCache()] * 3 + [wire.Inspect(0, 0, None)]
        gone.cancel()
        look.cancel()  # its answer is here before it has noticed
        engine.on_inspected(wire.Inspected(0, link.core.snapshot(0)))
        for done in (True, True, False):
            engine.on_prefix_cache_reset(wire.PrefixCacheReset(done))
        assert (await first, await third) == (True, False) and not engine._pending_resets
        await asyncio.wait([gone, look])
        assert gone.cancelled() and look.cancelled()

    run(inputs, body)


def test_what_is_cached_is_told_once_and_not_all_the_time() -> None:
    told: list[Any] = []
    loop = EngineLoop(FakeCore(), SimpleNamespace(send=told.append), reports_prefixes=True)  # type: ignore[arg-type]
    before = time.monotonic()
    for _ in range(2):
        loop._report_prefixes()
        assert loop._prefixes_due >= before + PREFIXES_EVERY_S
    assert told == [wire.CachedPrefixes([1, 2, 3])], "there is nothing new the second time"


def test_all_prompts_or_none(inputs: InputProcessor) -> None:
    async def body(engine: AsyncEngine, link: Link) -> None:
        stream = engine.submit("r", [inputs.prepare_prompt(t) for t in ("ab", "cde")], SamplingParams())
        with pytest.raises(RequestError, match="in use"):
            submit(engine)
        with pytest.raises(RequestError):
            submit(engine, name="s", stop_token_ids=[10**6])
        link.run(20)
        assert [o.outputs[0].text for o in await stream.results()] == ["ab", "cde"]
        assert engine.num_open == 1

    run(inputs, body)


def test_prompt_logprobs_and_figures_arrive(inputs: InputProcessor) -> None:
    async def body(engine: AsyncEngine, link: Link) -> None:
        stream = submit(engine, "abcd", prompt_logprobs=1, logprobs=1, max_tokens=3)
        link.run()
        (request,) = link.core.requests.values()
        request.num_draft_tokens, request.num_accepted_tokens, request.no_drafts_because = 4, 3, "why"
        link.run(10)
        output = (await stream.results())[0]
        assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == len(output.prompt_token_ids)
        assert output.outputs[0].cumulative_logprob == -3.0 and output.metrics.e2e_latency is not None
        assert (output.metrics.num_draft_tokens, output.metrics.num_accepted_tokens) == (4, 3)
        assert output.metrics.no_drafts_because == "why"
        given = output.outputs[0]
        assert given.logprobs is not None and [next(iter(entry)) for entry in given.logprobs] == given.token_ids

    run(inputs, body)


def test_the_loop_gives_up_after_broken_steps_in_a_row() -> None:
    class Broken(FakeCore):
        has_work = True  # type: ignore[assignment]

        def step(self) -> list[Any]:
            raise RuntimeError("no")

    class Silent:
        def receive(self, timeout_ms: int) -> list[Any]:
            return []

    loop = EngineLoop(Broken(), Silent())  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="no"):
        loop.run()
    assert loop._broken_steps == MAX_BROKEN_STEPS


def test_broken_steps_with_good_ones_between_them_end_nothing_else(inputs: InputProcessor) -> None:
    async def body(engine: AsyncEngine, link: Link) -> None:
        for i in range(MAX_BROKEN_STEPS + 1):
            bad = engine.submit(f"bad {i}", [inputs.prepare_prompt(TEXT)], SamplingParams(), priority=BREAK)
            link.run(2)
            good = submit(engine, "ab", name=f"good {i}")
            link.run(5)
            assert (await bad.results())[0].outputs[0].finish_reason == "error"
            assert (await good.results())[0].outputs[0].text == "ab"

    run(inputs, body)


def test_a_step_beyond_the_last_end_does_not_keep_the_cache_from_being_reset() -> None:
    """It holds pages until it is taken in."""

    class Ahead(FakeCore):
        num_in_flight = 1

        @property
        def has_work(self) -> bool:
            return self.num_in_flight > 0

        def step(self) -> list[Any]:
            self.num_in_flight -= 1
            return []

        def reset_prefix_cache(self) -> bool:
            return self.num_in_flight == 0

    told: list[Any] = []
    loop = EngineLoop(Ahead(), SimpleNamespace(send=told.append))  # type: ignore[arg-type]
    loop._handle(wire.ResetPrefixCache())
    assert told == [wire.PrefixCacheReset(True)]


def test_a_dead_engine_ends_its_process_whatever_it_was_doing() -> None:
    """Also where it dies in the step that is in flight when the prefix cache is reset."""

    class Dead(FakeCore):
        has_work = True  # type: ignore[assignment]

        def step(self) -> list[Any]:
            raise EngineDeadError("a rank has died")

    loop = EngineLoop(Dead(), Link())  # type: ignore[arg-type]
    with pytest.raises(EngineDeadError):
        loop._handle(wire.ResetPrefixCache())


def test_counters_of_the_engine_reach_the_server(inputs: InputProcessor) -> None:
    told = EngineStats(num_waiting=1, num_free_pages=3, num_stalls=6, num_evicted_states=2, steps_by_mode={"FULL": 5})

    async def body(engine: AsyncEngine, link: Link) -> None:
        link.core.stats = lambda: told  # type: ignore[method-assign]
        submit(engine)
        link.run()
        assert engine.stats == told

    run(inputs, body)


class Listener:
    def __init__(self) -> None:
        self.firsts: list[float] = []
        self.nexts: list[int] = []
        self.iterations: list[int] = []

    def first_token(self, seconds: float) -> None:
        self.firsts.append(seconds)

    def next_tokens(self, seconds: float, count: int) -> None:
        assert 0 <= seconds < 5
        self.nexts.append(count)

    def iteration(self, num_tokens: int) -> None:
        self.iterations.append(num_tokens)


def test_times_of_tokens_are_told_per_message(inputs: InputProcessor) -> None:
    """One first token per request; further ones of the same message together."""

    async def body(engine: AsyncEngine, link: Link) -> None:
        listener = Listener()
        engine._token_times = [listener]
        for name in ("a", "b"):
            submit(engine, name=name, max_tokens=4, ignore_eos=True)
        link.run(10)
        assert len(listener.firsts) == 2 and all(0 <= s < 5 for s in listener.firsts)
        assert listener.nexts == [2, 2, 2]
        prompt = len(engine.inputs.prepare_prompt(TEXT).token_ids)
        assert listener.iterations == [2 * prompt + 2, 2, 2, 2]

    run(inputs, body)


def test_a_look_gets_its_own_answer_also_where_another_one_gets_none(inputs: InputProcessor) -> None:
    """An answer is lost, for example, when a replica dies first."""

    async def body(engine: AsyncEngine, link: Link) -> None:
        lost, *asked = (asyncio.create_task(engine.inspect(replica=i)) for i in range(3))
        await asyncio.sleep(0)
        link.inbox = [m for m in link.inbox[::-1] if isinstance(m, wire.Inspect) and m.replica != 0]
        numbers = [m.number for m in link.inbox[::-1]]
        link.run()
        assert [(await look).number for look in asked] == numbers and not lost.done()
        lost.cancel()
        await asyncio.wait([lost])
        assert not engine._inspections
        engine.on_inspected(wire.Inspected(0, link.core.snapshot(0)))  # too late
        dead = asyncio.create_task(engine.inspect())
        await asyncio.sleep(0)
        engine.die("gone")
        with pytest.raises(EngineDeadError, match="gone"):
            await dead

    run(inputs, body)
