"""Constraints as grammars, and the process that tries them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from tests.server.running import is_alive
from weft.config import resolve
from weft.engine.grammars import GrammarCompiler
from weft.engine.structured_outputs import (
    check_grammar,
    choice,
    constraint_of_params,
    json_schema,
    regex,
    whole_grammar,
)
from weft.errors import RequestError
from weft.sampling_params import StructuredOutputsParams
from weft.server import grammar_check, grammar_worker
from weft.server.grammar_check import GrammarChecker
from weft.server.protocol import BodyReader, CompletionRequest
from weft.server.structured import constraint_of, end_of_reasoning, forced_calls
from weft.server.tool_use import tool_schemas
from weft.text.tokenizer import Tokenizer

CONFIG = resolve(device="cpu")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(CONFIG.tokenizer_path)


def make_checker() -> GrammarChecker:
    return GrammarChecker(CONFIG.tokenizer_path, CONFIG.model_config.vocab_size, [2041])


def test_every_kind_compiles_also_after_reasoning(tokenizer: Tokenizer) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    constraints = [
        json_schema(schema, "p"),
        regex("[0-9]+/x", "p"),
        choice(["a", 'b"\n'], "p"),
        forced_calls({"f": schema, "g\"'": {}}, tokenizer, several=True, max_bytes=10_000),
    ]

    async def main() -> None:
        checker = make_checker()
        for constraint in constraints:
            for end in (None, end_of_reasoning(tokenizer)):
                await checker.check(constraint.grammar(end), "p")
        checker.close()

    asyncio.run(main())


GBNF = """root ::= (expr "=" num "\\n")+
expr ::= num ([-+*/] num)*
num ::= [0-9]+
"""


def test_gbnf_grammars_are_converted(tokenizer: Tokenizer) -> None:
    grammar = whole_grammar(GBNF, "p").grammar()
    check_grammar(grammar, "p")
    compiler = LLTokenizer(str(CONFIG.tokenizer_path / "tokenizer.json"), n_vocab=CONFIG.model_config.vocab_size)
    for text, fits in (("1+2=3", True), ("1+=3", False)):
        tokens = tokenizer.encode(text, add_special_tokens=False)
        assert (LLMatcher(compiler, grammar).validate_tokens(tokens) == len(tokens)) is fits


@pytest.mark.parametrize("grammar", ["start: /a/", '%llguidance {}\nstart: "::="', "start: X\nX: /::=/"])
def test_lark_grammars_stay_as_they_are(grammar: str) -> None:
    assert whole_grammar(grammar, "p").rules == grammar


@pytest.mark.parametrize(
    ("grammar", "error"),
    [
        ("root ::= missing", "Rule 'missing' not found"),
        ("root ::= (", "cannot be converted"),
        ("root ::= " + "(" * 1500 + '"a"' + ")" * 1500, "cannot be converted"),
        ("root ::= " + '"a" ' * 2000, "8,009 characters; up to 4,096 are converted"),
    ],
)
def test_gbnf_that_cannot_be_converted_is_refused(grammar: str, error: str) -> None:
    for read in (
        lambda: constraint_of_params(StructuredOutputsParams(grammar=grammar)),
        lambda: constraint_of(request_of(guided_grammar=grammar), 100_000),
    ):
        with pytest.raises(RequestError, match=error) as refused:
            read()
        assert "Lark" in str(refused.value)


def request_of(**fields: Any) -> CompletionRequest:
    return CompletionRequest(prompt="x", **fields)


@pytest.mark.parametrize("parameters", [None, {"properties": {"a": {"type": "integer"}}}, {"type": "object"}])
def test_arguments_of_a_forced_call_are_an_object(tokenizer: Tokenizer, parameters: Any) -> None:
    schemas = tool_schemas([{"type": "function", "function": {"name": "f", "parameters": parameters}}])
    grammar = forced_calls(schemas, tokenizer, several=False, max_bytes=10_000).grammar()
    file = str(CONFIG.tokenizer_path / "tokenizer.json")
    accepted = []
    for arguments in ('{"a": 1}', "5", "[1]"):
        matcher = LLMatcher(LLTokenizer(file, n_vocab=2048, eos_token=[2041]), grammar, log_level=0)
        call = f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'
        accepted.append(matcher.consume_tokens(tokenizer.encode(call, add_special_tokens=False)))
    assert accepted == [True, False, False]


@pytest.mark.parametrize("parameters", [{"type": "array"}, {"type": ["string", "null"]}, [1], "x", True])
def test_parameters_that_are_no_object_are_refused(parameters: Any) -> None:
    with pytest.raises(RequestError, match=r"tools\[0\]\.function\.parameters has type .*of type 'object'"):
        tool_schemas([{"type": "function", "function": {"name": "f", "parameters": parameters}}])


@pytest.mark.parametrize(
    ("folder", "eos", "words"),
    [
        (CONFIG.tokenizer_path, [], "p cannot be used: a constraint needs a token that ends the text"),
        (Path("/nowhere"), [2041], "p cannot be used: llguidance cannot read /nowhere/tokenizer.json"),
    ],
)
def test_checkpoints_that_cannot_be_constrained(folder: Path, eos: list[int], words: str) -> None:
    """A caller is told why, and not that the machine is busy; the engine would say the same."""

    async def main() -> None:
        checker = GrammarChecker(folder, 2048, eos)
        for grammar in ("start: /a/", "start: /b/"):
            with pytest.raises(RequestError, match=words):
                await checker.check(grammar, "p")
        checker.close()

    asyncio.run(main())
    error = GrammarCompiler(folder, 2048, eos).compile("start: /a/").exception()
    assert isinstance(error, RequestError) and str(error).startswith(words.removeprefix("p cannot be used: "))


def pids_of(checker: GrammarChecker) -> set[int]:
    processes = [worker._process for worker in tuple(checker._workers._workers)]  # their threads replace them
    return {process.pid for process in processes if process is not None}


async def kill(checker: GrammarChecker) -> set[int]:
    """Kill all processes of the checker, and wait for their ends."""
    pids = pids_of(checker)
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    while any(map(is_alive, pids)):
        await asyncio.sleep(0.005)
    await asyncio.sleep(0)
    return pids


def test_a_worker_that_is_slow_or_dies_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_check, "TIMEOUT_S", 0.2)

    async def main() -> None:
        checker = make_checker()
        await checker.check("start: /a/", "p")
        (first,) = pids_of(checker)
        with pytest.raises(RequestError, match=r"longer than 0\.2 s"):
            await checker.check("start: " + " | ".join(f'"{i}"' for i in range(100_000)), "p")
        await checker.check("start: /c/", "p")
        assert first not in pids_of(checker)
        killed = await kill(checker)
        for number in range(2 * len(killed)):  # no task is blamed for the death of a process that was idle
            await checker.check(f"start: /d{number}/", "p")
        assert not killed & pids_of(checker)
        dies = asyncio.create_task(checker.check("start: /e/", "p"))
        while not dies.done():
            await kill(checker)
        with pytest.raises(RequestError, match="too much memory"):
            await dies
        await checker.check("start: /f/", "p")
        await checker.check("start: /a/", "p")  # remembered, no worker needed
        with pytest.raises(RequestError, match="p cannot be used"):
            await checker.check("start: /(/", "p")
        last = pids_of(checker)
        checker.close()
        assert last and not any(map(is_alive, {first, *last}))

    asyncio.run(main())


def test_the_latest_answers_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_check, "_MAX_REMEMBERED", 2)
    asked: list[str] = []

    async def ask(self: GrammarChecker, grammar: str) -> str:
        asked.append(grammar)
        return ""

    monkeypatch.setattr(GrammarChecker, "_ask", ask)

    async def main() -> None:
        checker = make_checker()
        for grammar in "abcbca":
            await checker.check(grammar, "p")

    asyncio.run(main())
    assert asked == ["a", "b", "c", "a"]


@pytest.mark.parametrize(
    ("constraint", "words"),
    [
        (json_schema({"type": "object", "dependentRequired": {"a": ["b"]}}, "p"),
         'the schema cannot be compiled: these keywords are not supported: "dependentRequired"'),
        (json_schema({"type": "strange"}, "p"), "the schema cannot be compiled: Invalid type: strange"),
        (json_schema({"type": "string", "pattern": "("}, "p"), "the regular expression ( is not valid: unclosed group"),
        (json_schema({"$ref": "#"}, "p"), "no text of finite length matches it"),
        (regex("a(?=b)", "p"), "look-around, including look-ahead and look-behind, is not supported"),
    ],
)  # fmt: skip
def test_errors_are_told_in_plain_words(tokenizer: Tokenizer, constraint: Any, words: str) -> None:
    eos, file = [2041], str(CONFIG.tokenizer_path / "tokenizer.json")
    problem = grammar_worker.problem_of(constraint.grammar(), LLTokenizer(file, n_vocab=2048, eos_token=eos))
    assert words in grammar_check.plain(problem) and "answer" not in grammar_check.plain(problem)


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"structured_outputs": {"choice": ["a"]}}, "structured_outputs"),
        ({"guided_grammar": "start: /a/"}, "guided_grammar"),
    ],
)
def test_where_the_constraint_comes_from(fields: dict[str, object], found: str | None) -> None:
    body = json.dumps({"prompt": "x", **fields}).encode()
    constraint = constraint_of(BodyReader(strict=True).read(body, CompletionRequest), 1000)
    assert (constraint.param if constraint else None) == found
