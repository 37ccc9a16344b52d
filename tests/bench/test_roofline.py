"""The roofline reproduces floors that were computed by hand for two published geometries."""

from __future__ import annotations

from pathlib import Path

import pytest

from weft.bench.roofline import H200, Ceilings, Roofline, Work, ceilings_of, floor_columns
from weft.bench.throughput import ThroughputWorkload
from weft.config.checkpoint import read_checkpoint_config
from weft.config.layer_spec import CacheDtypes

CONFIGS = Path(__file__).parent.parent.parent / "benchmarks" / "configs"

CONTEXT = 1024 + 128 / 2
"""Mean length of a sequence while 128 tokens are decoded after a prompt of 1,024."""

DECODE_MS = {
    "qwen3-0.6b": {1: 0.31, 8: 0.52, 32: 1.22, 128: 4.04, 256: 7.80},
    "qwen3-next-12l": {1: 0.54, 8: 1.73, 32: 4.80, 128: 9.50},
    "qwen3-next-48l-fp8": {1: 0.94, 8: 3.41, 32: 9.85, 128: 20.4},
}
PREFILL_MS = {
    "qwen3-0.6b": {16: 0.28, 64: 0.28, 128: 0.28, 256: 0.30, 512: 0.61, 1024: 1.30, 2048: 2.91, 8192: 19.0},
    "qwen3-next-12l": {16: 2.8, 64: 6.9, 128: 8.7, 256: 9.4, 512: 9.5, 1024: 9.5, 2048: 9.5, 8192: 19.4},
    "qwen3-next-48l-fp8": {16: 5.5, 128: 17.3, 512: 18.8, 1024: 18.8, 2048: 18.8},
}


def roofline(name: str) -> Roofline:
    return Roofline(read_checkpoint_config(CONFIGS / name), CacheDtypes("bfloat16", "bfloat16", "bfloat16"))


@pytest.mark.parametrize("name", DECODE_MS)
def test_floor_of_a_decode_step(name: str) -> None:
    for batch_size, want in DECODE_MS[name].items():
        got = roofline(name).decode(batch_size, CONTEXT).floor_s(H200) * 1e3
        assert got == pytest.approx(want, rel=0.03), batch_size


@pytest.mark.parametrize("name", PREFILL_MS)
def test_floor_of_a_prefill(name: str) -> None:
    for num_tokens, want in PREFILL_MS[name].items():
        got = roofline(name).prefill(num_tokens).floor_s(H200) * 1e3
        assert got == pytest.approx(want, rel=0.03), num_tokens


@pytest.mark.parametrize("name", sorted(folder.name for folder in CONFIGS.iterdir()))
def test_every_model_of_the_benchmarks_has_a_floor(name: str) -> None:
    """Some models need pages of several tokens. A floor has no pages."""
    for work in (roofline(name).decode(8, CONTEXT), roofline(name).prefill(8192)):
        assert 0.0 < work.floor_s(H200) < 10.0


def test_products_in_fp8_take_the_time_of_their_own_ceiling() -> None:
    work = Work(0.0, 3e12, fp8_flops=2e12)
    assert work.floor_s(Ceilings(1.0, 1e12, 4e12, "")) == pytest.approx(1.5)
    assert roofline("qwen3-next-12l").prefill(8192).fp8_flops == 0.0
    fp8 = roofline("qwen3-next-48l-fp8").prefill(8192)
    assert 0.5 * fp8.flops < fp8.fp8_flops < fp8.flops


def test_floor_of_a_queue() -> None:
    """The published workload on the small model: about 36,000 output tokens a second."""
    workload = ThroughputWorkload()
    prompts, lengths = workload.requests(vocab_size=151_936)
    seconds = roofline("qwen3-0.6b").queue_s([len(p) for p in prompts], lengths, H200)
    assert sum(lengths) / seconds == pytest.approx(36_000, rel=0.05)


def test_a_float32_state_costs_more_bytes_and_no_more_arithmetic() -> None:
    model = read_checkpoint_config(CONFIGS / "qwen3-next-12l")
    small, large = (
        Roofline(model, CacheDtypes("bfloat16", "bfloat16", d)).decode(32, CONTEXT) for d in ("bfloat16", "float32")
    )
    entries = 9 * 32 * 128 * 128
    assert large.num_bytes - small.num_bytes == 32 * 2 * 2 * entries and large.flops == small.flops


def test_columns() -> None:
    assert floor_columns(Work(2e12, 1e12), 4.0, Ceilings(1e12, 1e12, 1e12, "")) == {
        "floor_ms": 2000.0,
        "floor_share": 0.5,
    }
    assert floor_columns(Work(1.0, 1.0), 4.0, None) == {"floor_ms": None, "floor_share": None}
    assert ceilings_of("cpu") is None
