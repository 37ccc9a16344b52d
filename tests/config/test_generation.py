"""generation_config.json: what is read, what is listed as not used, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from weft.config.generation import GenerationDefaults, read_generation_config
from weft.errors import ConfigError


def generation(folder: Path, config: dict[str, Any]) -> GenerationDefaults:
    (folder / "generation_config.json").write_text(json.dumps(config))
    return read_generation_config(folder)


def test_generation_defaults(tmp_path: Path) -> None:
    assert read_generation_config(tmp_path) == GenerationDefaults()
    assert generation(tmp_path, {"transformers_version": "5.0", "pad_token_id": 1}) == GenerationDefaults()
    sampled = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [5, 7]}
    assert generation(tmp_path, sampled) == GenerationDefaults(0.6, 20, 0.95, eos_token_ids=(5, 7))
    assert generation(tmp_path, {"min_p": 0, "repetition_penalty": 1.05, "eos_token_id": 3}) == GenerationDefaults(
        min_p=0.0, repetition_penalty=1.05, eos_token_ids=(3,)
    )


def test_what_is_not_used_is_listed(tmp_path: Path) -> None:
    used = {"max_new_tokens": 9, "suppress_tokens": [3], "top_k": 5}
    neutral = {
        "num_beams": 1,
        "no_repeat_ngram_size": 0,
        "use_cache": True,
        "_from_model_config": True,
        "_commit_hash": "0a1b2c",
        "pad_token_id": 7,
    }
    config = generation(tmp_path, used | neutral | {"no_repeat_ngram_size": 3, "forced_eos_token_id": 2})
    assert (config.max_new_tokens, config.suppress_tokens) == (9, (3,))
    assert config.not_used == ("no_repeat_ngram_size=3", "forced_eos_token_id=2")


def test_do_sample_false_is_greedy(tmp_path: Path) -> None:
    assert generation(tmp_path, {"do_sample": False, "temperature": 0.6}).temperature == 0.0
    assert generation(tmp_path, {"temperature": 0.6}).temperature == 0.6
    assert generation(tmp_path, {"temperature": 0, "top_k": -1}) == GenerationDefaults(0.0, -1)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"temperature": -0.1}, "temperature=-0.1 is not valid"),
        ({"temperature": "hot"}, "temperature='hot' is not valid"),
        ({"top_k": 1.5}, "top_k=1.5 is not valid"),
        ({"top_p": 0}, "top_p=0 is not valid; expected a number above 0"),
        ({"top_p": 1.5}, "top_p=1.5 is not valid; expected a share of at most 1"),
        ({"min_p": 2}, "min_p=2 is not valid"),
        ({"repetition_penalty": 0}, "repetition_penalty=0 is not valid"),
        ({"eos_token_id": ["</s>"]}, r"eos_token_id=\['</s>'\] is not valid"),
        ({"do_sample": 1}, "do_sample=1 is not valid"),
        ({"max_new_tokens": 0}, "max_new_tokens=0 is not valid"),
        ({"suppress_tokens": [-1]}, "suppress_tokens=.-1. is not valid"),
    ],
)
def test_bad_generation_defaults(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        generation(tmp_path, config)


@pytest.mark.parametrize(
    ("content", "message"),
    [(b'{"top_k": 20', "is not valid JSON.*truncated"), (b"[]", "holds a JSON list"), (b"\xff", "is not UTF-8 text")],
)
def test_broken_generation_files(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=f"generation_config.json {message}"):
        read_generation_config(tmp_path)
