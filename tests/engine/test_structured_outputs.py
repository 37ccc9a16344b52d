"""Constraints on the form of the text, in ``SamplingParams``; the bundled model."""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from tests.whole import unless_long
from weft import LLM, SamplingParams, StructuredOutputsParams
from weft.engine.grammars import GrammarCompiler, Grammars
from weft.errors import EngineDeadError, RequestError
from weft.messages import RowSampling, ScheduledRequest
from weft.request import Request

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(max_num_seqs=4, max_model_len=256) as engine:
        yield engine
        assert not engine._core._grammars._matchers, "the grammar of a request that has ended is kept"


def generate(llm: LLM, n: int = 1, **constraint: Any) -> list[str]:
    params = SamplingParams(
        n=n, temperature=1.0, seed=3, max_tokens=80, structured_outputs=StructuredOutputsParams(**constraint)
    )
    outputs = llm.generate("12 + 30 =", params, use_tqdm=False)[0].outputs
    assert {output.finish_reason for output in outputs} == {"stop"}
    return [output.text for output in outputs]


def test_each_kind(llm: LLM) -> None:
    for schema in (SCHEMA, json.dumps(SCHEMA)):
        value = json.loads(generate(llm, json=schema)[0])
        assert isinstance(value["a"], int) and value["b"] in ("x", "y")
    assert re.fullmatch(r"[0-9]{3}/x", generate(llm, regex=r"[0-9]{3}/x")[0])
    assert generate(llm, regex=r"\\/a\/") == [r"\/a/"]
    assert set(generate(llm, n=3, choice=["yes", "no"])) <= {"yes", "no"}
    assert generate(llm, grammar='start: "a" "b"')[0] == "ab"
    any_object = SamplingParams(max_tokens=8, structured_outputs=StructuredOutputsParams(json_object=True))
    assert llm.generate("12", any_object, use_tqdm=False)[0].outputs[0].text.lstrip().startswith("{")


def test_beside_free_requests(llm: LLM) -> None:
    free = SamplingParams(temperature=0.0, max_tokens=8)
    bound = SamplingParams(temperature=0.0, structured_outputs=StructuredOutputsParams(choice=["ab"]))
    alone = llm.generate("12 + 30 =", free, use_tqdm=False)[0].outputs[0].token_ids
    together = llm.generate(["12 + 30 ="] * 3, [free, bound, free], use_tqdm=False)
    assert [o.outputs[0].token_ids for o in together[::2]] == [alone, alone]
    assert together[1].outputs[0].text == "ab"


@pytest.mark.parametrize(
    ("constraint", "message"),
    [
        ({}, "has no constraint; give exactly one of json, regex"),
        ({"json_object": False}, "has no constraint"),
        ({"json": {}, "regex": "a"}, "has json and regex"),
        ({"json": '{"type":'}, "not a JSON schema"),
        ({"json": {"type": "alien"}}, "cannot be used: .*Invalid type: alien"),
        ({"regex": "("}, "cannot be used: at 2.*invalid regex"),
        ({"regex": "a\nb"}, "on one line"),
        ({"choice": []}, "at least one option"),
        ({"grammar": "garbage"}, "cannot be used"),
    ],
)
def test_what_is_refused(llm: LLM, constraint: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        generate(llm, **constraint)
    assert llm.is_finished()


def test_contradictions() -> None:
    ab = StructuredOutputsParams(choice=["ab"])
    for other in ({"min_tokens": 2}, {"ignore_eos": True}):
        with pytest.raises(RequestError, match="contradicts structured_outputs"):
            SamplingParams(structured_outputs=ab, **other)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="is a dict; give StructuredOutputsParams"):
        SamplingParams(structured_outputs={"choice": ["a"]})  # type: ignore[arg-type]


def test_without_a_tokenizer() -> None:
    with LLM(max_num_seqs=2, max_model_len=64, skip_tokenizer_init=True) as engine:
        with pytest.raises(RequestError, match="need the tokenizer, but skip_tokenizer_init"):
            engine.generate(
                [5], SamplingParams(structured_outputs=StructuredOutputsParams(choice=["a"])), use_tqdm=False
            )
        with pytest.raises(RequestError, match="no tokenizer"):
            engine.get_tokenizer()


def test_an_abort_while_the_grammar_compiles(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    never: Future[Any] = Future()
    monkeypatch.setattr(llm._core._grammars._compiler, "compile", lambda grammar: never)
    name = llm.add_request("a", SamplingParams(structured_outputs=StructuredOutputsParams(choice=["a"])))
    assert llm.step() == [] and not llm.is_finished()
    assert (llm.stats().num_waiting, llm.stats().num_running) == (1, 0) and llm._core.snapshot().totals.num_waiting == 1
    output = llm.abort(name)
    assert output is not None and output.finished and output.outputs[0].finish_reason == "abort"
    assert output.metrics.e2e_latency is not None
    assert llm.is_finished() and not llm._core.has_work and llm.stats().num_waiting == 0


def test_of_what_a_grammar_allows_only_allowed_tokens_come(llm: LLM) -> None:
    assert llm.tokenizer is not None
    (a,) = llm.tokenizer.encode("a", add_special_tokens=False)
    constraint = StructuredOutputsParams(regex="[ab]{6}")
    params = SamplingParams(structured_outputs=constraint, allowed_token_ids=[a, *llm.config.eos_token_ids])
    (output,) = llm.generate("12 + 30 =", params, use_tqdm=False)
    assert output.outputs[0].text == "aaaaaa"


@pytest.mark.parametrize("speculative", unless_long([None], [None, '{"method": "ngram", "num_speculative_tokens": 3}']))
def test_options_that_leave_no_token_end_their_request_with_the_reason(speculative: str | None) -> None:
    """And nothing else: neighbours go on, and what was computed of the prompt is reused."""
    prompt = "12 + 30 = 42, 12 + 31 = 43, ab aaaaaaaa aaaaaaaa: " * 3
    free = SamplingParams(temperature=0.0, max_tokens=12)

    def bound(**fields: Any) -> SamplingParams:
        return SamplingParams(temperature=0.0, max_tokens=20, **fields)

    with LLM(max_num_seqs=4, max_model_len=512, speculative_config=speculative, enable_overlap=True) as engine:
        assert engine.tokenizer is not None
        (a,) = engine.tokenizer.encode("a", add_special_tokens=False)
        regex = StructuredOutputsParams(regex="[ab]{6}")
        cases = {
            "after 6 generated tokens, the structured output and allowed_token_ids leave no token": bound(
                structured_outputs=regex, allowed_token_ids=[a], bad_words=["zz"]
            ),
            "after 0 generated tokens, the structured output and bad_words leave no token": bound(
                structured_outputs=StructuredOutputsParams(choice=["a"]), bad_words=["a"]
            ),
            "after 3 generated tokens, allowed_token_ids and bad_words leave no token": bound(
                allowed_token_ids=[a], bad_words=["aaaa"]
            ),
        }
        (alone,) = engine.generate(prompt + "x", free, use_tqdm=False)
        outputs = engine.generate(
            [prompt + "x", *(prompt + str(i) for i in range(len(cases)))], [free, *cases.values()], use_tqdm=False
        )
        assert outputs[0].outputs[0].token_ids == alone.outputs[0].token_ids
        for message, output in zip(cases, outputs[1:], strict=True):
            completion = output.outputs[0]
            assert completion.finish_reason == "error" and str(completion.stop_reason).startswith(message)
            num_tokens = int(message.split()[1])
            assert completion.text == "a" * num_tokens and completion.token_ids == [a] * num_tokens
        word = [token for letter in "aaac" for token in engine.tokenizer.encode(letter, add_special_tokens=False)]
        stops = bound(
            structured_outputs=StructuredOutputsParams(regex="[ab]{3}c"),
            allowed_token_ids=word,
            stop_token_ids=word[-1:],
        )
        (stopped,) = engine.generate([{"prompt_token_ids": word * 4}], stops, use_tqdm=False)
        assert stopped.outputs[0].token_ids == word, "after a stop token nothing has to come"
        assert stopped.outputs[0].finish_reason == "stop"
        assert (stopped.metrics.num_accepted_tokens > 0) is (speculative is not None)
        again = engine.generate(prompt + "0", free, use_tqdm=False)[0]
        assert again.num_cached_tokens >= len(again.prompt_token_ids) - 1, "the prefix was forgotten"
        engine._core.manager.check()


@pytest.mark.parametrize(
    ("drafts", "num_followed"), [("", 0), ("abab", 4), ("ab", 2), ("acab", 1), ("bab", 0), ("ab.b", 2), ("abx", 2)]
)
def test_masks_of_drafts(llm: LLM, drafts: str, num_followed: int) -> None:
    """There is one more mask than drafts. Each mask is computed as if the previous drafts had been generated, as far as
    the grammar allows them. ``.`` ends the text, ``x`` is no token."""
    assert llm.tokenizer is not None
    config, ids = llm.config, {".": llm.config.eos_token_ids[0], "x": llm.config.model_config.vocab_size}
    ids |= {letter: llm.tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "abc"}
    grammars = Grammars(config.tokenizer_path, config.model_config.vocab_size, config.eos_token_ids)
    request = Request("r", array("I", [1]), RowSampling(grammar='start: ("ab")*'), max_tokens=9)
    grammars.add(request)
    while not grammars.compiled(may_wait=True):
        pass

    def masks(drafts: str) -> list[bytes]:
        scheduled = ScheduledRequest(3, 1, 1 + len(drafts), [], 0, True, draft_token_ids=[ids[d] for d in drafts])
        return grammars.masks([(3, request)], [scheduled])[3]

    found = masks(drafts)
    assert len(found) == 1 + len(drafts), "every position has a mask, however few of them can count"
    for draft, mask in zip(drafts + ".", found[: 1 + num_followed], strict=False):
        assert masks("") == [mask], "the mask of the text so far"
        allowed = [letter for letter in "abc." if mask[ids[letter] // 8] >> ids[letter] % 8 & 1]
        assert allowed == (["b"] if len(request.output_token_ids) % 2 else ["a", "."])
        request.output_token_ids.append(ids[draft])
        grammars.update([request])
    grammars.close()


def test_an_abort_leaves_no_grammar_behind(llm: LLM) -> None:
    name = llm.add_request("a", SamplingParams(structured_outputs=StructuredOutputsParams(regex="[ab]{90}")))
    while not llm.step():
        pass
    assert llm.abort(name) is not None and not llm._core._grammars._matchers


def test_the_grammar_that_was_used_longest_ago_is_forgotten(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.engine.grammars.MAX_CACHED", 2)
    config = llm.config
    compiler = GrammarCompiler(config.tokenizer_path, config.model_config.vocab_size, config.eos_token_ids)
    a, b, again, _ = (compiler.compile(f'start: "{word}"') for word in "abac")
    assert again is a
    assert compiler.compile('start: "a"') is a and compiler.compile('start: "b"') is not b
    compiler.close()


def test_a_step_that_breaks_leaves_no_grammar_behind(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(*step: Any) -> None:
        raise RuntimeError("broken")

    llm.add_request("a", SamplingParams(structured_outputs=StructuredOutputsParams(regex="[ab]{90}"), max_tokens=99))
    while not llm.stats().num_running:
        llm.step()
    monkeypatch.setattr(llm._core._executor, "launch", breaks)
    with pytest.raises(RuntimeError, match="broken"):
        llm.step()
    monkeypatch.undo()
    while not llm.is_finished():
        llm.step()
    assert not llm._core._grammars._matchers


def test_a_dead_engine_ends_what_waits_for_its_grammar_or_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    never: Future[Any] = Future()

    def dies(*step: Any) -> None:
        raise EngineDeadError("a rank has died")

    with LLM(max_num_seqs=1, max_model_len=256) as engine:
        monkeypatch.setattr(engine._core._grammars._compiler, "compile", lambda grammar: never)
        monkeypatch.setattr(engine._core._executor, "launch", dies)
        constrained = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["a"]))
        for name in ("compiling", "running", "waiting"):
            engine.add_request("a", constrained if name == "compiling" else SamplingParams(), name)
        with pytest.raises(EngineDeadError):
            engine.step()
        ended = {output.request_id: output.outputs[0].finish_reason for output in engine.step()}
        assert ended == dict.fromkeys(("compiling", "running", "waiting"), "error") and engine.is_finished()
