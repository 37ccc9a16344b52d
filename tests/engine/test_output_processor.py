"""Text as it grows: stop strings, half characters, what is kept and dropped; scripted tokens, no model."""

from __future__ import annotations

import itertools
import random
from array import array
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from weft.engine.output_processor import OutputStream
from weft.engine.prompts import PreparedPrompt
from weft.messages import RowSampling, TokenLogprobs
from weft.request import Request
from weft.sampling_params import SamplingParams
from weft.text.tokenizer import Tokenizer

EOS, OTHER_SPECIAL = 2, 1
TEXT = "the quick brown fox, naïve 世界 🙂 and the dog"


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.load(folder)


@pytest.fixture
def play(tokenizer: Tokenizer) -> Callable[..., Any]:
    """Feed tokens to a stream one at a time as ``LLM.step`` does; returns (texts after each token, final output)."""

    def play(tokens: Iterable[int], max_tokens: int = 1000, stop_ids: Iterable[int] = (), **fields: Any) -> Any:
        params = SamplingParams(max_tokens=max_tokens, stop_token_ids=list(stop_ids), **fields)
        request = Request(
            "r/0",
            array("I", [5]),
            RowSampling(min_tokens=params.min_tokens),
            max_tokens,
            stop_token_ids=frozenset(stop_ids),
            eos_token_ids=frozenset() if params.ignore_eos else frozenset({EOS}),
        )
        stream = OutputStream("r", PreparedPrompt(None, [5]), [request], params, tokenizer)
        texts: list[str] = []
        for token in tokens:
            request.append(token, TokenLogprobs([token], [-0.5], 1) if params.logprobs is not None else None)
            stop = stream.take(request)
            if stop is not None:
                request.finish_reason, request.stop_reason = "stop", stop
            texts.append(stream.output().outputs[0].text)
            if stream.finished:
                break
        return texts, stream.output().outputs[0]

    return play


def test_text_grows_and_never_shows_half_a_character(play: Callable[..., Any], tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode(TEXT)
    assert len(tokens) > len(TEXT) / 2 and any("\ufffd" in tokenizer.decode(tokens[:i]) for i in range(len(tokens)))
    texts, output = play([*tokens, EOS])
    assert output.text == TEXT and output.token_ids == [*tokens, EOS] and output.finish_reason == "stop"
    for before, after in itertools.pairwise(texts):
        assert after.startswith(before) and "\ufffd" not in after
    for i, text in enumerate(texts[:-1], start=1):
        assert text == tokenizer.decode(tokens[:i]).rstrip("\ufffd")


def test_half_a_character_at_the_end_is_shown_as_such(play: Callable[..., Any], tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("ab 世")[:-1]
    texts, output = play(tokens, max_tokens=len(tokens))
    assert texts[-2] == "ab " and output.text == tokenizer.decode(tokens) != "ab "
    assert output.finish_reason == "length"


@pytest.mark.parametrize(
    "stop", ["x, na", "🙂", "e 世界", " and the dog", "t", "the quick brown fox, naïve 世界 🙂 and"]
)
@pytest.mark.parametrize("include", [False, True])
def test_stop_strings_across_token_borders(
    play: Callable[..., Any], tokenizer: Tokenizer, stop: str, include: bool
) -> None:
    tokens = tokenizer.encode(TEXT)
    texts, output = play([*tokens, EOS], stop=["never", stop], include_stop_str_in_output=include)
    end = TEXT.index(stop)
    assert output.text == TEXT[: end + len(stop) * include]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    assert stop in tokenizer.decode(output.token_ids) and stop not in tokenizer.decode(output.token_ids[:-1])
    assert all(after.startswith(before) for before, after in itertools.pairwise(texts))
    assert include or all(TEXT[:end].startswith(text) for text in texts)


def test_a_stop_string_completed_by_the_very_last_token_counts(play: Callable[..., Any], tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("one dog")
    _, output = play(tokens, max_tokens=len(tokens), stop="dog")
    assert (output.text, output.finish_reason, output.stop_reason) == ("one ", "stop", "dog")
    _, output = play(tokens[:-1], max_tokens=len(tokens) - 1, stop="dog")
    assert output.text == tokenizer.decode(tokens[:-1]) and output.finish_reason == "length"


def test_a_stop_string_completed_by_what_was_held_back(play: Callable[..., Any], tokenizer: Tokenizer) -> None:
    tokens = [*tokenizer.encode("ab"), tokenizer.encode("世")[0]]
    _, output = play(tokens, max_tokens=3, stop="b\ufffd")
    assert (output.text, output.finish_reason, output.stop_reason) == ("a", "stop", "b\ufffd")
    _, output = play(tokens, max_tokens=3, min_tokens=3, stop="\ufffd")
    assert (output.text, output.stop_reason) == ("ab", "\ufffd")


def test_a_stop_string_does_not_count_before_min_tokens(play: Callable[..., Any], tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("a,b,c,d,e,f")
    _, output = play([*tokens, EOS], stop=",", min_tokens=5)
    assert output.text == "a,b,c" and len(output.token_ids) == 6


def test_no_log_probabilities_beyond_the_stop(play: Callable[..., Any], tokenizer: Tokenizer) -> None:
    _, output = play(tokenizer.encode("a,b,c"), stop=",b", logprobs=0)
    assert len(output.logprobs) == len(output.token_ids) == 3
    assert output.cumulative_logprob == -1.5


def test_deltas_bring_each_log_probability_and_the_end_once(tokenizer: Tokenizer) -> None:
    request = Request("r/0", array("I", [5]), RowSampling(), 9)
    stream = OutputStream("r", PreparedPrompt(None, [5]), [request], SamplingParams(logprobs=0), tokenizer)
    tokens = tokenizer.encode("a,b,c,d")[:4]
    got = []
    for new in (tokens[:1], tokens[1:3], tokens[3:], []):
        for token in new:
            request.append(token, TokenLogprobs([token], [-0.5], 1))
        if not new:
            request.end("abort")
        stream.take(request)
        stream.catch_up()
        got += stream.deltas()
        assert not stream.deltas()
    assert [list(delta.token_ids) for delta in got] == [tokens[:1], tokens[1:3], tokens[3:], []]
    assert [[next(iter(entry)) for entry in delta.logprobs or []] for delta in got] == [d.token_ids for d in got]
    assert [delta.finish_reason for delta in got] == [None, None, None, "abort"]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "ab"),
        ({"skip_special_tokens": False}, "a<|im_start|>b<|im_end|>"),
        ({"include_stop_str_in_output": True}, "ab"),
        ({"skip_special_tokens": False, "include_stop_str_in_output": True}, "a<|im_start|>b<|im_end|>"),
        ({"skip_special_tokens": False, "stop": "<|im_end|>"}, "a<|im_start|>b"),
        ({"detokenize": False}, ""),
    ],
)
def test_special_tokens(play: Callable[..., Any], tokenizer: Tokenizer, fields: dict[str, Any], text: str) -> None:
    a, b = tokenizer.encode("ab")
    _, output = play([a, OTHER_SPECIAL, b, EOS], **fields)
    assert (output.text, output.token_ids, output.finish_reason) == (text, [a, OTHER_SPECIAL, b, EOS], "stop")


@pytest.mark.parametrize(("include", "text"), [(False, "a"), (True, "ab")])
def test_the_text_of_a_stop_token(play: Callable[..., Any], tokenizer: Tokenizer, include: bool, text: str) -> None:
    a, b = tokenizer.encode("ab")
    _, output = play([a, b], stop_ids=[b], include_stop_str_in_output=include)
    assert (output.text, output.stop_reason, output.token_ids) == (text, b, [a, b])


def test_ignored_ends_are_text_like_any_other(play: Callable[..., Any], tokenizer: Tokenizer) -> None:
    a, b = tokenizer.encode("ab")
    _, output = play([a, EOS, b], max_tokens=3, ignore_eos=True, skip_special_tokens=False)
    assert output.text == "a<|im_end|>b" and output.finish_reason == "length"


@pytest.mark.parametrize("seed", range(5))
def test_any_tokens_add_up_to_their_decoding(play: Callable[..., Any], tokenizer: Tokenizer, seed: int) -> None:
    tokens = random.Random(seed).choices(range(3, tokenizer.vocab_size), k=60)
    texts, output = play(tokens, max_tokens=60)
    assert output.text == tokenizer.decode(tokens)
    assert all(after.startswith(before) for before, after in itertools.pairwise(texts))
    decoded = tokenizer.decode(tokens)
    stop = decoded[20:23]
    _, output = play(tokens, max_tokens=60, stop=stop)
    assert output.text == decoded[: decoded.index(stop)]


def test_figures_of_several_completions() -> None:
    """The first token of any, the end of the last one, preemptions and computed prompt tokens of all."""
    requests = [Request(f"r/{i}", array("I", [5] * 6), RowSampling(), 4, arrival_time=10.0) for i in range(2)]
    moments = ((13.0, 30.0), (12.0, 20.0))
    for number, (request, (first, end)) in enumerate(zip(requests, moments, strict=True)):
        request.append(7, None)
        request.end("abort")
        request.times.first_token, request.times.finished = first, end
        request.num_preemptions, request.num_cached_tokens = 1 + number, 5 * number
    for completions in (requests, requests[::-1]):
        stream = OutputStream("r", PreparedPrompt(None, [5] * 6), completions, SamplingParams(n=2), None)
        metrics = stream.output().metrics
        assert (metrics.time_to_first_token, metrics.e2e_latency, metrics.num_preemptions) == (2.0, 20.0, 3)
        assert stream.num_prefilled_tokens == 6 + 1
