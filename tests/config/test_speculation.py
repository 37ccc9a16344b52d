"""``speculative_config``: vLLM's keys, SGLang's names for them, and what is refused."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from tests.models.mtp_reference import make_mtp_checkpoint
from tests.tiny import make_checkpoint
from weft.config import resolve
from weft.config.speculation import SpeculativeConfig, parse_speculative_config
from weft.errors import ConfigError


def test_keys_defaults_and_reasons() -> None:
    config = resolve(speculative_config='{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 5}')
    assert config.speculative_config == SpeculativeConfig("ngram", 3, 5, 5) and config.num_drafts == 3
    assert "3 drafts" in config.reasons["speculative_config"] and not config.drafts_on_device
    assert resolve(speculative_config={"method": "ngram"}, enable_overlap=True).drafts_on_device
    assert pickle.loads(pickle.dumps(config)) == config
    off = resolve()
    assert off.speculative_config is None and off.num_drafts == 0 and "off" in off.reasons["speculative_config"]
    assert parse_speculative_config({"method": "ngram"}) == SpeculativeConfig("ngram", 4, 2, 4)


def test_the_models_own_head(tmp_path: Path) -> None:
    folder, _ = make_mtp_checkpoint("Qwen3NextForCausalLM", tmp_path)
    for given in ({"algorithm": "NEXTN", "num_steps": 2, "eagle_topk": 1}, {"method": "mtp"}):
        config = resolve(model=str(folder), speculative_config=given)
        assert config.speculative_config is not None and config.speculative_config.method == "mtp"
        assert config.num_drafts == 2 and config.model_config.runs_mtp and not config.enable_overlap
    assert not resolve(model=str(folder)).model_config.runs_mtp
    with pytest.raises(ConfigError, match="multi-token-prediction head"):
        resolve(model=str(make_checkpoint("Qwen3ForCausalLM", tmp_path / "none")), speculative_config={"method": "mtp"})


def test_the_head_drafts_for_batches_on_a_cpu_only_if_a_number_is_given(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """More than one sequence decodes faster without drafts there."""
    folder, _ = make_mtp_checkpoint("Qwen3NextForCausalLM", tmp_path)
    own = resolve(model=str(folder), device="cpu", speculative_config={"method": "mtp"})
    assert [own.num_drafts_at(count) for count in (1, 2, 24)] == [2, 0, 0]
    assert "slow batches down" in own.reasons["speculative_config"] and not caplog.records
    given = resolve(model=str(folder), device="cpu", speculative_config={"method": "mtp", "num_speculative_tokens": 1})
    assert [given.num_drafts_at(count) for count in (1, 24)] == [1, 1]
    assert "slow batches down" in given.reasons["speculative_config"] and "slow batches down" in caplog.text
    assert resolve(device="cpu", speculative_config={"method": "ngram"}).num_drafts_at(24) == 4, "no pass of a head"


@pytest.mark.parametrize(
    "given",
    [
        {"algorithm": "NGRAM", "num_steps": 3, "eagle_topk": 1, "num_draft_tokens": 4},
        {"algorithm": "NGRAM", "num_draft_tokens": 4},
        {"algorithm": "NGRAM", "num_steps": None, "num_draft_tokens": 4},
        {"algorithm": "NGRAM", "num_steps": 3, "eagle_topk": None, "num_draft_tokens": None},
        {"method": "ngram", "num_speculative_tokens": 3},
    ],
)
def test_names_of_another_engine(given: dict[str, Any]) -> None:
    assert parse_speculative_config(given) == SpeculativeConfig("ngram", 3, 2, 4)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("{", "not JSON"),
        ("3", "not a mapping"),
        ({}, "names no method"),
        ({"method": "eagle"}, "allowed: ngram, mtp"),
        ({"method": "mtp", "prompt_lookup_max": 3}, "no effect"),
        ({"method": "magic"}, "not known"),
        ({"method": ["ngram"]}, "not known"),
        ({"method": "ngram", "model": "x"}, "unknown key 'model'"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "allowed: 1 to 16"),
        ({"method": "ngram", "num_speculative_tokens": 17}, "allowed: 1 to 16"),
        ({"method": "ngram", "num_speculative_tokens": True}, "not an integer"),
        ({"method": "ngram", "num_speculative_tokens": "3"}, "not an integer"),
        ({"method": "ngram", "prompt_lookup_min": 5, "prompt_lookup_max": 2}, "is more than"),
        ({"algorithm": "ngram", "eagle_topk": 2}, "no tree"),
        ({"algorithm": "ngram", "num_steps": 3, "num_draft_tokens": 3}, "not one more"),
        ({"algorithm": "ngram", "num_draft_tokens": "many"}, "not an integer"),
        ({"algorithm": "ngram", "method": "ngram"}, "one thing twice"),
    ],
)
def test_refusals(given: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        resolve(speculative_config=given)


def test_a_step_needs_room_for_a_draft() -> None:
    given = {"method": "ngram", "num_speculative_tokens": 1}
    with pytest.raises(ConfigError, match=r"speculative_config: max_num_batched_tokens=1 .*=2 or more"):
        resolve(speculative_config=given, max_num_batched_tokens=1)
    assert resolve(speculative_config=given, max_num_batched_tokens=2).num_drafts == 1
    assert resolve(max_num_batched_tokens=1).max_num_batched_tokens == 1


def test_a_synthetic_rate_needs_dummy_weights() -> None:
    given = {"method": "ngram", "synthetic_acceptance_rate": 0.8}
    with pytest.raises(ConfigError, match="load_format='dummy'"):
        resolve(speculative_config=given)
    reason = resolve(speculative_config=given, load_format="dummy").reasons["speculative_config"]
    assert "accepted with probability 0.8" in reason
    for wrong in (1.5, -0.1, "much", True):
        with pytest.raises(ConfigError, match="0 to 1"):
            parse_speculative_config({"method": "ngram", "synthetic_acceptance_rate": wrong})
