"""The public interface: forms of prompts, order, chat, steps, aborts, life of an engine."""

from __future__ import annotations

import itertools
import json
import logging
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.engine.conftest import assert_idle
from weft import LLM, SamplingParams
from weft.engine.llm import NOT_SUPPORTED
from weft.errors import EngineDeadError, NotSupportedError, RequestError

TEXT = "hello world"
SHORT = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


def first(outputs: list[Any]) -> list[int]:
    return outputs[0].outputs[0].token_ids


# -- generate --------------------------------------------------------------------------------------------------------


def test_every_form_of_a_prompt_gives_the_same(llm: LLM) -> None:
    assert llm.tokenizer is not None
    ids = llm.tokenizer.encode(TEXT)
    forms: list[Any] = [TEXT, ids, tuple(ids), {"prompt": TEXT}, {"prompt_token_ids": ids}]
    forms += [{"prompt": "shown", "prompt_token_ids": ids}]
    alone = [llm.generate(form, SHORT, use_tqdm=False) for form in forms]
    together = llm.generate(forms, SHORT, use_tqdm=False)
    for output in [*(o for outputs in alone for o in outputs), *together]:
        assert output.prompt_token_ids == ids and output.finished
        assert output.outputs[0].token_ids == first(together)
    assert [o.prompt for o in together] == [TEXT, None, None, TEXT, None, "shown"]
    assert together[0].outputs[0].text == llm.tokenizer.decode(first(together))
    assert llm.generate([], use_tqdm=False) == []


def test_outputs_come_in_input_order_with_their_own_parameters(llm: LLM) -> None:
    lengths = [9, 1, 17, 4, 2, 11]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lengths]
    outputs = llm.generate([[5 + i] * (i + 1) for i in range(6)], params, use_tqdm=False)
    assert [len(o.outputs[0].token_ids) for o in outputs] == lengths
    assert [len(o.prompt_token_ids) for o in outputs] == [1, 2, 3, 4, 5, 6]
    assert {o.outputs[0].finish_reason for o in outputs} == {"length"}


def test_metrics(llm: LLM) -> None:
    metrics = llm.generate(TEXT, SHORT, use_tqdm=False)[0].metrics
    assert metrics.time_in_queue is not None and metrics.time_to_first_token is not None
    assert metrics.e2e_latency is not None and metrics.num_preemptions == 0
    assert 0 <= metrics.time_in_queue < metrics.time_to_first_token < metrics.e2e_latency


def test_statistics_are_those_of_their_moment(llm: LLM) -> None:
    before = llm.stats()
    llm.generate(TEXT, SHORT, use_tqdm=False)
    assert llm.stats().num_steps > before.num_steps == sum(before.steps_by_mode.values())


def test_samples_that_end_at_different_times(llm: LLM) -> None:
    """One sample's stop token must not end the others; the prompt is finished when the last one is."""
    free = llm.generate(TEXT, SamplingParams(n=3, seed=5, max_tokens=20, ignore_eos=True), use_tqdm=False)[0].outputs
    stop = next(t for t in free[1].token_ids[2:6] if t not in free[2].token_ids)
    llm.add_request(TEXT, SamplingParams(n=3, seed=5, max_tokens=20, ignore_eos=True, stop_token_ids=[stop]))
    finished = []
    while not llm.is_finished():
        for output in llm.step():
            finished.append([c.finish_reason is not None for c in output.outputs])
            last = output
    assert [True, True, True] not in finished[:-1] and [False, True, False] in finished
    assert [c.index for c in last.outputs] == [0, 1, 2] and last.finished
    assert last.outputs[1].token_ids[-1] == stop == last.outputs[1].stop_reason
    assert last.outputs[2].token_ids == free[2].token_ids


def test_progress_bar(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate([TEXT] * 3, SHORT)
    shown = capsys.readouterr().err
    assert "3/3" in shown and "prefill" in shown and "decode" in shown and "tok/s" in shown
    llm.generate(TEXT, SHORT, use_tqdm=False)
    assert capsys.readouterr().err == ""


def test_priorities(folder: Path) -> None:
    with LLM(str(folder), max_num_seqs=1, schedule_policy="priority") as engine:
        for name, rank in {"last": 5, "second": 1, "third": 1, "first": -3}.items():
            engine.add_request(TEXT, SHORT, name, priority=rank)
        order = []
        while not engine.is_finished():
            order += [o.request_id for o in engine.step() if o.finished]
    assert order == ["first", "second", "third", "last"]


def test_prompts_are_truncated_from_the_left(llm: LLM) -> None:
    assert llm.tokenizer is not None
    prompt = {"prompt_token_ids": list(range(5, 25)), "checkpoint_positions": [3, 15, 17]}
    (output,) = llm.generate(prompt, SamplingParams(truncate_prompt_tokens=6, max_tokens=1), use_tqdm=False)
    assert output.prompt_token_ids == list(range(19, 25))
    (same,) = llm.generate([5, 6], SamplingParams(truncate_prompt_tokens=6, max_tokens=1), use_tqdm=False)
    assert same.prompt_token_ids == [5, 6]
    long = "hello world " * 200
    for max_tokens, room in ((None, 1), (20, 20)):
        params = SamplingParams(truncate_prompt_tokens=-1, max_tokens=max_tokens, stop_token_ids=list(range(320)))
        (output,) = llm.generate(long, params, use_tqdm=False)
        assert len(output.prompt_token_ids) == llm.max_model_len - room
        assert output.prompt is not None and long.endswith(output.prompt)
    with pytest.raises(RequestError, match="truncate_prompt_tokens=0 leaves no prompt"):
        SamplingParams(truncate_prompt_tokens=0)


def test_what_a_truncated_prompt_keeps(llm: LLM) -> None:
    """Positions move with it, its salt stays."""
    prompt = {"prompt_token_ids": list(range(10)), "checkpoint_positions": [2, 5, 8], "cache_salt": "s"}
    prepared = llm._inputs.prepare_prompt(prompt, SamplingParams(truncate_prompt_tokens=5))
    assert (prepared.token_ids, prepared.checkpoint_positions, prepared.cache_salt) == ([5, 6, 7, 8, 9], [3], "s")


@pytest.mark.parametrize("name", NOT_SUPPORTED)
def test_what_vllm_has_and_weft_has_not(llm: LLM, name: str) -> None:
    with pytest.raises(NotSupportedError, match=rf"LLM\.{name}: .*(use|give) "):
        getattr(llm, name)
    assert not hasattr(llm, name) and not hasattr(llm, "no_such_thing")


def test_reset_prefix_cache(folder: Path) -> None:
    prompt = list(range(5, 105))
    with LLM(str(folder), max_num_seqs=2, enable_overlap=True) as engine:
        for cached in (0, 99):
            assert engine.generate([prompt], SHORT, use_tqdm=False)[0].num_cached_tokens == cached
        engine.add_request([5] * 4, SHORT)
        engine.step()
        assert not engine.reset_prefix_cache()
        while not engine.is_finished():
            engine.step()
        assert engine.reset_prefix_cache()
        cache = engine._core.manager.stats()
        assert (cache.num_evictable_pages, cache.num_evictable_slots) == (0, 0)
        assert_idle(engine)
        assert engine.generate([prompt], SHORT, use_tqdm=False)[0].num_cached_tokens == 0


def test_the_tokenizer_of_transformers(llm: LLM, folder: Path) -> None:
    theirs = AutoTokenizer.from_pretrained(folder)
    assert llm.get_tokenizer().encode(TEXT) == theirs.encode(TEXT)
    assert llm.get_default_sampling_params() == SamplingParams()


# -- chat ------------------------------------------------------------------------------------------------------------

CONVERSATION = [
    {"role": "system", "content": "answer"},
    {"role": "user", "content": "one two"},
    {"role": "assistant", "content": "three"},
    {"role": "user", "content": "four <|im_end|>"},
]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
TEMPLATE_WITH_TOOLS = (
    "{%- if tools %}{{- tools | tojson }}{%- endif %}{%- for m in messages %}{{- m.content }}{%- endfor %}"
)


@pytest.mark.parametrize("kwargs", [{}, {"enable_thinking": False}, {"enable_thinking": True}])
def test_chat_text_equals_transformers(llm: LLM, folder: Path, kwargs: dict[str, Any]) -> None:
    theirs = AutoTokenizer.from_pretrained(folder)
    output = llm.chat(CONVERSATION, SHORT, use_tqdm=False, chat_template_kwargs=kwargs)[0]
    want = theirs.apply_chat_template(CONVERSATION, tokenize=False, add_generation_prompt=True, **kwargs)
    assert output.prompt == want
    assert output.prompt_token_ids == theirs(want, add_special_tokens=False)["input_ids"]
    assert first(llm.generate({"prompt_token_ids": output.prompt_token_ids}, SHORT, use_tqdm=False)) == first([output])


def test_chat_with_tools_many_conversations_and_continuations(folder: Path, tmp_path: Path) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    changed = json.dumps(settings | {"chat_template": TEMPLATE_WITH_TOOLS})
    (tmp_path / "tokenizer_config.json").write_text(changed, encoding="utf-8")
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    with LLM(str(tmp_path)) as engine:
        theirs = AutoTokenizer.from_pretrained(tmp_path)
        want = theirs.apply_chat_template(CONVERSATION, tools=TOOLS, tokenize=False)
        outputs = engine.chat([CONVERSATION, CONVERSATION[:2]], SHORT, use_tqdm=False, tools=TOOLS)
        assert outputs[0].prompt == want and '"name": "add"' in want
        assert outputs[1].prompt is not None and outputs[1].prompt.endswith("answerone two")


def test_continue_final_message(llm: LLM) -> None:
    messages = [*CONVERSATION[:2], {"role": "assistant", "content": "The answer is"}]
    output = llm.chat(messages, SHORT, use_tqdm=False, add_generation_prompt=False, continue_final_message=True)[0]
    assert output.prompt is not None and output.prompt.endswith("The answer is")


# -- step by step ----------------------------------------------------------------------------------------------------


def test_steps_show_growing_snapshots(llm: LLM) -> None:
    want = llm.generate([TEXT, "the fox"], SHORT, use_tqdm=False)
    ids = [llm.add_request(TEXT, SHORT), llm.add_request("the fox", SHORT, "mine")]
    assert ids[1] == "mine" and ids[0] != ids[1]
    seen: dict[str, list[Any]] = {name: [] for name in ids}
    while not llm.is_finished():
        for output in llm.step():
            seen[output.request_id].append(output)
    for name, final in zip(ids, want, strict=True):
        snapshots = [o.outputs[0] for o in seen[name]]
        assert [len(s.token_ids) for s in snapshots] == [1, 2, 3, 4, 5, 6]
        assert [s.token_ids for s in snapshots] == [final.outputs[0].token_ids[:n] for n in range(1, 7)]
        assert snapshots[-1].text == final.outputs[0].text
        assert [o.finished for o in seen[name]] == [False] * 5 + [True]
    assert llm.step() == []


def test_streamed_text_adds_up(llm: LLM) -> None:
    """Random bytes: whatever the model says, pieces add up to the decoded tokens."""
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=60, ignore_eos=True)
    llm.add_request(TEXT, params)
    text = ""
    while not llm.is_finished():
        for output in llm.step():
            assert output.outputs[0].text.startswith(text)
            text = output.outputs[0].text
    assert llm.tokenizer is not None and text == llm.tokenizer.decode(output.outputs[0].token_ids)


def test_a_stop_string_ends_a_request_and_nothing_else(llm: LLM) -> None:
    long = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    free, beside = llm.generate([TEXT, "the fox"], long, use_tqdm=False)
    text = free.outputs[0].text
    stop = next(text[i : i + 3] for i in range(4, len(text)) if "\ufffd" not in text[i : i + 3])
    cut = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, stop=[stop, "never"])
    outputs = llm.generate([TEXT, "the fox"], [cut, long], use_tqdm=False)
    assert outputs[0].outputs[0].text == text[: text.index(stop)]
    assert (outputs[0].outputs[0].finish_reason, outputs[0].outputs[0].stop_reason) == ("stop", stop)
    assert outputs[1].outputs[0].token_ids == beside.outputs[0].token_ids
    count = len(outputs[0].outputs[0].token_ids)
    exact = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, stop=stop)
    last = llm.generate(TEXT, exact, use_tqdm=False)[0].outputs[0]
    assert (last.text, last.finish_reason, last.stop_reason) == (text[: text.index(stop)], "stop", stop)


def test_abort_while_waiting_prefilling_and_decoding(folder: Path) -> None:
    with LLM(str(folder), max_num_seqs=2, max_num_batched_tokens=32) as engine:
        params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
        for name, length in {"decoding": 3, "prefilling": 100, "waiting": 5}.items():
            engine.add_request([9] * length, params, name)
        for _ in range(3):
            engine.step()
        assert (engine.stats().num_running, engine.stats().num_waiting) == (2, 1)
        outputs = {name: engine.abort(name) for name in ("waiting", "prefilling", "decoding")}
        assert engine.is_finished() and engine.abort("decoding") is None and engine.abort("never there") is None
        for name, count in {"waiting": 0, "prefilling": 0, "decoding": 3}.items():
            output = outputs[name]
            assert output is not None and output.finished and output.outputs[0].finish_reason == "abort"
            assert len(output.outputs[0].token_ids) == count
        assert engine.tokenizer is not None and outputs["decoding"] is not None
        assert outputs["decoding"].outputs[0].text == engine.tokenizer.decode(outputs["decoding"].outputs[0].token_ids)
        assert engine.step() == []
        assert_idle(engine)
        assert len(first(engine.generate([9] * 3, params, use_tqdm=False))) == 30


@pytest.mark.parametrize("how", ["abort", "stop"])
def test_the_last_request_leaves_nothing_behind(folder: Path, how: str) -> None:
    """With overlap a step is in flight when the last request ends: it is taken in, and frees what it held."""
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    with LLM(str(folder), enable_overlap=True) as llm:
        known = first(llm.generate([[5, 6, 7]], params, use_tqdm=False))
        if how == "stop":
            params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, stop_token_ids=[known[4]])
        name = llm.add_request([5, 6, 7], params)
        for _ in range(4):
            llm.step()
        assert llm._core.has_work and not llm.is_finished()
        if how == "abort":
            llm.abort(name)
        while not llm.is_finished():
            llm.step()
        assert not llm._core.has_work
        assert_idle(llm)


def test_aborting_a_prompt_ends_all_its_samples(llm: LLM) -> None:
    llm.add_request(TEXT, SamplingParams(n=3, seed=1, max_tokens=30, ignore_eos=True), "many")
    llm.step(), llm.step()
    output = llm.abort("many")
    assert output is not None and [len(c.token_ids) for c in output.outputs] == [2, 2, 2]
    assert {c.finish_reason for c in output.outputs} == {"abort"}
    assert_idle(llm)


def test_ids_are_the_user_s_own(llm: LLM) -> None:
    """Ids that look like Weft's own do not collide with them, and may be used again."""
    for name in ("request-0", "request-1", "a", "a/0", "a/1"):
        llm.add_request(TEXT, SamplingParams(n=2, max_tokens=3), name)
    assert llm.add_request(TEXT, SHORT) not in ("request-0", "request-1")
    with pytest.raises(RequestError, match="'a' is already in use"):
        llm.add_request(TEXT, SHORT, "a")
    while not llm.is_finished():
        llm.step()
    llm.add_request(TEXT, SHORT, "a")
    assert llm.abort("a") is not None


# -- life of an engine -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True])
def test_with_overlap_one_step_is_in_flight(overlap: bool, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(str(folder), enable_overlap=overlap) as engine:
        executor, order = engine._core._executor, list[str]()
        for name in ("launch", "result"):
            method = getattr(executor, name)
            monkeypatch.setattr(executor, name, lambda *a, m=method, n=name: order.append(n) or m(*a))
        engine.generate([5], SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)
    behind = ["launch", *["launch", "result"] * 2, "result"]
    assert order == (behind if overlap else ["launch", "result"] * 3)


def test_an_interrupt_leaves_no_step_in_flight(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(str(folder), enable_overlap=True) as engine:
        launch, calls = engine._core._executor.launch, itertools.count(1)

        def interrupted(*step: Any) -> None:
            if next(calls) == 3:
                raise KeyboardInterrupt
            launch(*step)

        monkeypatch.setattr(engine._core._executor, "launch", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.generate([TEXT] * 3, SHORT, use_tqdm=False)
        assert_idle(engine)


def test_an_interrupted_step_ends_its_requests_and_nothing_else(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    want = first(llm.generate(TEXT, SHORT, use_tqdm=False))
    executor = llm._core._executor
    launch = executor.launch
    calls = 0

    def interrupted(*step: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        return launch(*step)

    monkeypatch.setattr(executor, "launch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([TEXT] * 3, SHORT, use_tqdm=False)
    assert_idle(llm)
    assert first(llm.generate(TEXT, SHORT, use_tqdm=False)) == want
    calls = 1
    llm.add_request(TEXT, SHORT, "broken")
    llm.step()
    with pytest.raises(KeyboardInterrupt):
        llm.step()
    assert llm._core.has_work, "the end of the broken request has to be returned"
    llm.add_request(TEXT, SHORT, "later")
    outputs = {}
    while not llm.is_finished():
        outputs.update((o.request_id, o.outputs[0]) for o in llm.step())
    assert outputs["broken"].finish_reason == "error" and outputs["broken"].token_ids == want[:1]
    assert outputs["later"].token_ids == want


@pytest.fixture
def sigint_raises() -> Iterator[None]:
    """Handle SIGINT as Python does when it begins. A shell that starts Python in the background has SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("sigint_raises")
@pytest.mark.parametrize("place", ["Manager.lease", "Manager.commit", "Manager.release", "Scheduler.schedule"])
def test_an_interrupt_waits_until_a_step_is_over(
    place: str, folder: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it comes, no page, slot or step is left without an owner."""
    want = first(llm.generate(TEXT, SHORT, use_tqdm=False))
    part, _, name = place.partition(".")
    target = {"Manager": llm._core.manager, "Scheduler": llm._core.scheduler}[part]
    method = getattr(target, name)

    def interrupted(*arguments: Any, **named: Any) -> Any:
        result = method(*arguments, **named)
        monkeypatch.setattr(target, name, method)
        signal.raise_signal(signal.SIGINT)
        return result

    handler = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(target, name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([TEXT] * 3, SHORT, use_tqdm=False)
    assert_idle(llm)
    assert signal.getsignal(signal.SIGINT) is handler
    assert first(llm.generate(TEXT, SHORT, use_tqdm=False)) == want


@pytest.mark.usefixtures("sigint_raises")
def test_a_second_interrupt_does_not_wait(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    launch, went_on = llm._core._executor.launch, []

    def interrupted(*step: Any) -> None:
        monkeypatch.setattr(llm._core._executor, "launch", launch)
        signal.raise_signal(signal.SIGINT)
        went_on.append("after the first")
        signal.raise_signal(signal.SIGINT)
        went_on.append("after the second")

    monkeypatch.setattr(llm._core._executor, "launch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(TEXT, SHORT, use_tqdm=False)
    assert went_on == ["after the first"]
    assert_idle(llm)


def test_shutdown_twice_and_use_afterwards(folder: Path) -> None:
    with LLM(str(folder)) as engine:
        engine.add_request(TEXT, SHORT)
        engine.shutdown()
        assert engine.is_finished()
    with pytest.raises(EngineDeadError, match="make a new LLM"):
        engine.generate(TEXT, SHORT, use_tqdm=False)


def test_profile(folder: Path, tmp_path: Path) -> None:
    with LLM(str(folder), profile_dir=tmp_path / "trace") as engine:
        engine.generate(TEXT, SHORT, use_tqdm=False)
    (trace,) = (tmp_path / "trace").iterdir()
    names = {event.get("name") for event in json.loads(trace.read_text())["traceEvents"]}
    assert "step 1: 1 requests, 6 tokens" in names or any(str(n).startswith("step 1: 1 requests") for n in names)


def test_without_a_model_the_bundled_one_answers() -> None:
    with LLM(max_model_len=256) as engine:
        output = engine.chat([{"role": "user", "content": "What is 12 + 30?"}], SHORT, use_tqdm=False)[0]
    assert len(output.outputs[0].token_ids) == 6 and output.prompt is not None and "12 + 30" in output.prompt


def test_a_tokenizer_is_not_needed(folder: Path, llm: LLM) -> None:
    with LLM(str(folder), skip_tokenizer_init=True) as engine:
        output = engine.generate([5, 6, 7], SamplingParams(temperature=0, max_tokens=5, logprobs=1), use_tqdm=False)[0]
    assert output.outputs[0].text == "" and output.outputs[0].logprobs is not None
    assert {e.decoded_token for entry in output.outputs[0].logprobs for e in entry.values()} == {None}
    params = SamplingParams(temperature=0, max_tokens=5, detokenize=False)
    silent = llm.generate([5, 6, 7], params, use_tqdm=False)[0].outputs[0]
    assert (silent.text, silent.token_ids) == ("", output.outputs[0].token_ids)


def test_the_cache_plan_is_explained(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="weft"), LLM(str(folder), num_kv_pages=5) as engine:
        assert engine.max_model_len == 64
    assert "max_model_len: clamped to 64" in caplog.text
