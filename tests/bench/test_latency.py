"""``weft bench latency`` with drafts: what a step gives, and a given share of right drafts."""

from __future__ import annotations

from weft import LLM
from weft.bench.latency import LatencyWorkload, measure


def test_a_given_share_of_drafts_is_right() -> None:
    config = {"method": "ngram", "num_speculative_tokens": 2, "synthetic_acceptance_rate": 0.8}
    settings = {"load_format": "dummy", "cpu_cache_gib": 0.05, "max_num_seqs": 2, "skip_tokenizer_init": True}
    settings |= {"max_model_len": 128, "piecewise_cuda_graph_tokens": [16]}
    with LLM(**settings, speculative_config=config, cuda_graph_mode="FULL") as llm:
        (row,) = measure(llm, LatencyWorkload((2,), prompt_len=9, output_len=40, repeats=1))
    assert row["drafts_per_step"] == 2 and 0.6 < row["acceptance_rate"] < 0.95
    assert 2.2 < row["tokens_per_step"] < 2.9
