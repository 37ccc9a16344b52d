"""``tests/test_deterministic.py`` with real kernels and graphs, in bfloat16, with the heads of real models.

Layers and experts are few, so that engines start in seconds. Weights are dummies.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.deterministic import HEAD, PATHS, Alone, InCompany, check, open_company, open_drafting
from tests.fp8_checkpoints import quantization_config
from tests.gpu.test_churn import Churn
from tests.x_matrix import PHASES, WHOLE, make_reference, part
from weft.config import determinism

pytestmark = pytest.mark.gpu

CONFIGS = Path(__file__).parents[2] / "benchmarks" / "configs"
SMALL = {"vocab_size": 8192, "max_position_embeddings": 1200}
FEW: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {"num_hidden_layers": 3},
    "qwen3-next-12l": {"num_hidden_layers": 4, "num_experts": 64},
    "granite-4.0-h-tiny": {"num_hidden_layers": 4, "layer_types": ["mamba", "mamba", "attention", "mamba"]},
    "jamba-mini-8l": {"num_experts": 4, "intermediate_size": 2048},
    "lfm2-8b-a1b": {"num_hidden_layers": 4, "layer_types": ["conv", "conv", "full_attention", "conv"]},
    "gpt-oss-20b": {
        "num_hidden_layers": 4,
        "num_local_experts": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_scaling": None,
    },
    "nemotron-h-8b": {"num_hidden_layers": 6, "hybrid_override_pattern": "M-M*M-"},
}
SETTINGS: dict[str, Any] = {"device": "cuda", "load_format": "dummy", "num_state_slots": 60}
TINY = {"device": "cuda", "dtype": "bfloat16", "num_state_slots": 60}
COLUMNS = [
    ("qwen3-next-12l", "NONE"), ("qwen3-next-12l", "FULL_AND_PIECEWISE"), ("qwen3-next-12l", "FULL"),
    ("qwen3-0.6b", "FULL"),
    ("granite-4.0-h-tiny", "FULL"), ("jamba-mini-8l", "FULL"), ("lfm2-8b-a1b", "FULL"), ("nemotron-h-8b", "FULL"),
    ("MiniMaxForCausalLM", "FULL"), ("qwen3-0.6b with FP8 KV", "FULL"),
    ("qwen3-next-12l drafting guesses", "FULL"), ("qwen3-next-12l drafting guesses", "NONE"),
    ("qwen3-0.6b drafting guesses", "FULL"), ("with a head drafting head", "FULL"),
    ("qwen3-0.6b in FP8", "FULL"), ("qwen3-0.6b in FP8 by block", "FULL"),
    ("gpt-oss-20b", "FULL"), ("gpt-oss-20b", "NONE"),
]  # fmt: skip
"""Model and mode. A class names a tiny checkpoint."""
FP8_KV, DRAFTING, FP8, BLOCK = " with FP8 KV", " drafting ", " in FP8", " by block"


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    def make(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name)
        if name.removesuffix(BLOCK) not in FEW:
            return make_reference(name, folder).folder
        name, by_block, _ = name.partition(BLOCK)
        config = json.loads((CONFIGS / name / "config.json").read_text()) | SMALL | FEW[name]
        if by_block:
            config["quantization_config"] = quantization_config("block")
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return make


def param(name: str, mode: str) -> Any:
    """An engine, for one process of several."""
    return pytest.param((name, mode), id=f"{name}-{mode}", marks=pytest.mark.xdist_group(f"{name}-{mode}"))


@pytest.fixture(scope="module", params=[param(*column) for column in COLUMNS])
def engine(request: pytest.FixtureRequest, folder_of: Any) -> Iterator[InCompany]:
    (name, mode), more = request.param, dict[str, Any]()
    if name.endswith(FP8_KV):
        name, more = name.removesuffix(FP8_KV), {"kv_cache_dtype": "fp8"}
    if name.endswith(FP8):
        name, more = name.removesuffix(FP8), {"quantization": "fp8"}
    name, _, drafter = name.replace(FP8 + BLOCK, BLOCK).partition(DRAFTING)
    settings = (SETTINGS if name.removesuffix(BLOCK) in FEW else TINY) | more
    company = partial(open_drafting, by=drafter) if drafter else open_company
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(determinism, "UNPROVEN_ON_GPU", ())  # here they are proven
        alone = Alone(folder_of(name), temperature=0.0 if drafter == HEAD else 0.8, **settings)
        with company(name, mode, "overlap", {name: alone}, **settings, page_size=16) as engine:
            Churn(engine.llm)
            yield engine
        alone.shutdown()


@pytest.mark.parametrize("length", part(65, 1000))
@pytest.mark.parametrize("phase", PHASES if WHOLE else ["mixed", "decode"])
@pytest.mark.parametrize("path", PATHS)
def test_bits_do_not_depend_on_the_company(engine: InCompany, path: str, phase: str, length: int) -> None:
    check(engine, path, phase, length)
