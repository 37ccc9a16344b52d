"""Ranges and types of sampling parameters: each error names the field, what was given and what is allowed."""

from __future__ import annotations

from typing import Any

import pytest

from weft.errors import RequestError
from weft.sampling_params import SamplingParams, StructuredOutputsParams

BAD: list[tuple[dict[str, Any], str]] = [
    ({"n": 0}, r"n=0 is outside the allowed range: 1 to 64"),
    ({"n": None}, r"n=None is not an integer"),
    ({"n": 2.0}, r"n=2\.0 is not an integer; allowed are integers, 1 to 64"),
    ({"temperature": -0.1}, r"temperature=-0\.1 is outside the allowed range: from 0 to 100"),
    ({"temperature": float("nan")}, r"temperature=nan is not a finite number"),
    ({"temperature": "hot"}, r"temperature='hot' is not a finite number; allowed are numbers from 0"),
    ({"top_k": -2}, r"top_k=-2 is outside the allowed range: -1 or more"),
    ({"top_p": 0.0}, r"top_p=0\.0 is outside the allowed range: above 0 to 1"),
    ({"top_p": 1.1}, r"top_p=1\.1 is outside"),
    ({"min_p": 1.5}, r"min_p=1\.5 is outside"),
    ({"presence_penalty": 2.5}, r"presence_penalty=2\.5 is outside the allowed range: from -2 to 2"),
    ({"frequency_penalty": None}, r"frequency_penalty=None is not a finite number"),
    ({"repetition_penalty": 0}, r"repetition_penalty=0 is outside the allowed range: from 1e-06 to 100"),
    ({"repetition_penalty": 1e-38}, r"repetition_penalty=1e-38 is outside"),  # a logit divided by it is infinite
    ({"logit_bias": {5: 101}}, r"logit_bias adds 101 to token 5; it is outside the allowed range: from -100 to 100"),
    ({"logit_bias": {"5": 1}}, r"logit_bias has the key '5'; it is not an integer"),
    ({"logit_bias": [5]}, r"is not a dict of token id -> number"),
    ({"allowed_token_ids": []}, r"allowed_token_ids is empty"),
    ({"allowed_token_ids": 5}, r"allowed_token_ids=5 is a int; give a list of token ids"),
    ({"stop_token_ids": [-1]}, r"stop_token_ids holds -1; it is outside the allowed range: 0 or more"),
    ({"stop_token_ids": "12"}, r"stop_token_ids='12' is a str; give a list"),
    ({"bad_words": "word"}, r"bad_words='word' is a str; give a list of texts"),
    ({"bad_words": [" "]}, r"bad_words holds ' '; every entry must be a non-empty text"),
    ({"bad_words": ["a", "b" * 1001]}, r"bad_words holds a text of 1,001 characters; at most 1,000 are allowed"),
    ({"seed": 2**64}, r"seed=18446744073709551616 is outside"),
    ({"seed": 1.5}, r"seed=1\.5 is not an integer"),
    ({"stop": ""}, r"stop holds ''; every stop string needs at least one character"),
    ({"stop": ["a", 5]}, r"stop holds 5"),
    ({"stop": 5}, r"stop=5 is a int; give a list of texts"),
    ({"stop": ["a"] * 17}, r"stop has 17 strings; at most 16 are allowed"),
    ({"stop": "a", "detokenize": False}, r"stop strings need text: leave detokenize=True or use stop_token_ids"),
    ({"max_tokens": 0}, r"max_tokens=0 is outside the allowed range: 1 or more"),
    ({"max_tokens": True}, r"max_tokens=True is not an integer"),
    ({"min_tokens": -1}, r"min_tokens=-1 is outside"),
    ({"min_tokens": 9, "max_tokens": 8}, r"min_tokens=9 is greater than max_tokens=8; lower one or raise the other"),
    ({"logprobs": -2}, r"logprobs=-2 is outside the allowed range: -1 or more"),
    ({"prompt_logprobs": -2}, r"prompt_logprobs=-2 is outside"),
    ({"ignore_eos": "no"}, r"ignore_eos='no' is not a truth value; give True or False"),
    ({"detokenize": None}, r"detokenize=None is not a truth value"),
    ({"top_p": 10**400}, r"0+ is outside the allowed range: above 0 to 1"),
    (
        {"max_tokens": 2**63},
        r"max_tokens=9\d+ is outside the allowed range: 1 or more, of at most 64 bits",
    ),
]


@pytest.mark.parametrize(("fields", "message"), BAD, ids=[str(fields) for fields, _ in BAD])
def test_bad_values(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        SamplingParams(**fields)
    assert caught.value.param in fields


def test_unknown_names_and_the_limits_themselves() -> None:
    for given, message in (
        ({"temprature": 1.0}, r"has no parameter 'temprature' \(given 1\.0\): did you mean temperature"),
        (
            {"extra_args": 2},
            r"has no parameter 'extra_args' \(given 2\): vLLM's, which this version",
        ),
        ({"zzz": 2}, r"'zzz' \(given 2\): allowed are n, temperature, .*truncate_prompt_tokens"),
    ):
        with pytest.raises(RequestError, match=message):
            SamplingParams(**given)
    with pytest.raises(RequestError, match=r"was given 0\.7 without a name; write SamplingParams\(n=…\)"):
        SamplingParams(0.7)  # type: ignore[misc]
    params = SamplingParams(
        n=64,
        temperature=100,
        top_k=-1,
        top_p=1,
        min_p=1,
        presence_penalty=-2,
        frequency_penalty=2,
        seed=-(2**63),
        stop=("a", "b"),  # type: ignore[arg-type]
        min_tokens=8,
        max_tokens=8,
        logprobs=20,
        prompt_logprobs=0,
    )
    assert params.stop_strings == ["a", "b"]
    assert SamplingParams(stop="ab").stop_strings == ["ab"] and SamplingParams().stop_strings == []


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"choice": "yes"}, r"choice='yes'; it must be a list of texts"),
        ({"choice": ["yes", None]}, r"choice=\['yes', None\]; it must be a list of texts"),
        ({"regex": 5}, r"regex=5; it must be a text"),
        ({"grammar": ["a"]}, r"grammar=\['a'\]; it must be a text"),
        ({"json": [1]}, r"json=\[1\]; it must be a JSON schema: a dict"),
        ({"json_object": "no"}, r"json_object='no'; it must be True or False"),
        ({"schema": {}}, r"has no parameter 'schema' \(given {}\): allowed are json, regex"),
    ],
)
def test_structured_outputs(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        StructuredOutputsParams(**fields)


def test_messages_are_not_as_long_as_what_was_given() -> None:
    with pytest.raises(
        RequestError, match=r"^seed='xxx.*xxx' is not an integer; allowed are integers, -9\d+ to"
    ) as caught:
        SamplingParams(seed="x" * 100_000)  # type: ignore[arg-type]
    assert len(str(caught.value)) < 1100


def test_a_field_is_assigned_only_if_its_value_is_valid() -> None:
    params = SamplingParams(max_tokens=5)
    copy = params.clone()
    copy.max_tokens = 7
    assert (params.max_tokens, copy.max_tokens) == (5, 7)
    for name, value in (("max_tokens", 0), ("min_tokens", 6), ("stop", ["a"] * 17), ("output_kind", 1)):
        with pytest.raises(RequestError, match=name):
            setattr(params, name, value)
    assert params == SamplingParams(max_tokens=5)
    with pytest.raises(RequestError, match="did you mean max_tokens"):
        params.max_token = 3  # type: ignore[attr-defined]
