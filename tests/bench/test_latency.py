"""``weft bench latency`` with drafts: what a step gives, and a given share of right drafts."""

from __future__ import annotations

import pytest

from tests.whole import takes_long
from weft import LLM, SamplingParams
from weft.bench import latency
from weft.bench.latency import LatencyWorkload, measure
from weft.errors import ConfigError


@takes_long
def test_a_given_share_of_drafts_is_right() -> None:
    config = {"method": "ngram", "num_speculative_tokens": 2, "synthetic_acceptance_rate": 0.8}
    settings = {"load_format": "dummy", "cpu_cache_gib": 0.05, "max_num_seqs": 2, "skip_tokenizer_init": True}
    settings |= {"max_model_len": 128, "piecewise_cuda_graph_tokens": [16]}
    with LLM(**settings, speculative_config=config, cuda_graph_mode="FULL") as llm:
        (row,) = measure(llm, LatencyWorkload((2,), prompt_len=9, output_len=40, repeats=1))
    assert row["drafts_per_step"] == 2 and 0.6 < row["acceptance_rate"] < 0.95
    assert 2.2 < row["tokens_per_step"] < 2.9


@takes_long
def test_a_batch_for_which_there_are_too_few_pages_is_refused() -> None:
    settings = {"load_format": "dummy", "max_num_seqs": 4, "num_kv_pages": 6, "skip_tokenizer_init": True}
    with LLM(**settings, max_model_len=64, cpu_cache_gib=0.05) as llm:
        assert measure(llm, LatencyWorkload((2,), prompt_len=20, output_len=12, repeats=1))
        with pytest.raises(ConfigError, match="--batch-sizes 3: this engine runs at most 2 sequences of 32 tokens"):
            measure(llm, LatencyWorkload((1, 3), prompt_len=20, output_len=12, repeats=1))


@pytest.mark.parametrize(("prompt_len", "output_len"), [(20, 8), (10, 12), (31, 2)])
def test_room_is_what_runs_together(prompt_len: int, output_len: int) -> None:
    settings = {"load_format": "dummy", "max_num_seqs": 8, "num_kv_pages": 9, "skip_tokenizer_init": True}
    params = SamplingParams(max_tokens=output_len, ignore_eos=True, detokenize=False)
    with LLM(**settings, max_model_len=64, enable_prefix_caching=False) as llm:
        for token in range(6):
            llm.add_request([token] * prompt_len, params)
        llm.step()
        room = llm.stats().num_running
        latency._check_room(llm, LatencyWorkload((room,), prompt_len, output_len))
        with pytest.raises(ConfigError, match=f"runs at most {room} sequences"):
            latency._check_room(llm, LatencyWorkload((room + 1,), prompt_len, output_len))
