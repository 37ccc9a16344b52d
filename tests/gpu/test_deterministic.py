"""``tests/test_deterministic.py`` with real kernels and graphs, in bfloat16, with the heads of real models.

Layers and experts are few, so that engines start in seconds. Weights are dummies.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.deterministic import HEAD, PATHS, Alone, InCompany, check, open_company, open_drafting
from tests.deterministic_cuts import FEW, cut
from tests.deterministic_images import AloneWithImages, check_images
from tests.gpu.test_churn import Churn
from tests.media import HYBRID, INKLING, VL
from tests.test_x_matrix_images import CASES
from tests.test_x_matrix_images import make_reference as make_images
from tests.x_matrix import PHASES, WHOLE, make_reference, part

pytestmark = pytest.mark.gpu

TINY: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16", "num_state_slots": 60}
SETTINGS = TINY | {"load_format": "dummy"}
COLUMNS = [
    ("qwen3-next-12l", "NONE"), ("qwen3-next-12l", "FULL_AND_PIECEWISE"), ("qwen3-next-12l", "FULL"),
    ("qwen3-0.6b", "FULL"),
    ("granite-4.0-h-tiny", "FULL"), ("jamba-mini-8l", "FULL"), ("lfm2-8b-a1b", "FULL"), ("nemotron-h-8b", "FULL"),
    ("MiniMaxForCausalLM", "FULL"), ("qwen3-0.6b with FP8 KV", "FULL"),
    ("qwen3-next-12l drafting guesses", "FULL"), ("qwen3-next-12l drafting guesses", "NONE"),
    ("qwen3-0.6b drafting guesses", "FULL"), ("with a head drafting head", "FULL"),
    ("qwen3-0.6b in FP8", "FULL"), ("qwen3-0.6b in FP8 by block", "FULL"),
    ("gpt-oss-20b", "FULL"), ("gpt-oss-20b", "NONE"),
    ("kimi-linear-12l", "FULL"), ("kimi-linear-12l", "NONE"), ("ling-3.0-flash-12l", "FULL_AND_PIECEWISE"),
    ("qwen3-next-12l in FP8", "FULL"), ("qwen3-next-12l in FP8 by block", "FULL"),
    ("RecurrentGemmaForCausalLM", "FULL"), ("Gemma3ForCausalLM", "FULL"), ("qwen3-next-12l with FP8 KV", "FULL"),
    ("granite-4.0-h-tiny drafting guesses", "FULL"), ("kimi-linear-12l drafting guesses", "FULL"),
    ("gpt-oss-20b drafting guesses", "NONE"), ("qwen3-next-12l drafting guesses", "PIECEWISE"),
    ("qwen3-next-12l traced by eager", "FULL_AND_PIECEWISE"),
    ("inkling", "FULL"), ("inkling", "NONE"), ("inkling drafting guesses", "FULL"), ("InklingForCausalLM", "FULL"),
    ("zaya1", "FULL"), ("zaya1 drafting guesses", "FULL"), ("ZayaForCausalLM", "NONE"),
]  # fmt: skip
"""Model and mode. A class names a tiny checkpoint."""
DRAFTING, FP8, BLOCK = " drafting ", " in FP8", " by block"
WITH: dict[str, dict[str, Any]] = {
    " with FP8 KV": {"kv_cache_dtype": "fp8"}, FP8: {"quantization": "fp8"},
    " traced by eager": {"piecewise_cuda_graph_compiler": "eager"},
}  # fmt: skip
"""The end of a column's name, and what it sets."""


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    def make(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name)
        if name.removesuffix(BLOCK) not in FEW:
            return make_reference(name, folder).folder
        name, by_block, _ = name.partition(BLOCK)
        return cut(name, folder, fp8_by_block=bool(by_block))

    return make


def param(name: str, mode: str) -> Any:
    """An engine, for one process of several."""
    return pytest.param((name, mode), id=f"{name}-{mode}", marks=pytest.mark.xdist_group(f"{name}-{mode}"))


@pytest.fixture(scope="module", params=[param(*column) for column in COLUMNS])
def engine(request: pytest.FixtureRequest, folder_of: Any) -> Iterator[InCompany]:
    (name, mode), more = request.param, dict[str, Any]()
    for end, settings in WITH.items():
        if name.endswith(end):
            name, more = name.removesuffix(end), settings
    name, _, drafter = name.replace(FP8 + BLOCK, BLOCK).partition(DRAFTING)
    settings = (SETTINGS if name.removesuffix(BLOCK) in FEW else TINY) | more
    company = partial(open_drafting, by=drafter) if drafter else open_company
    plain = {key: value for key, value in settings.items() if not key.startswith("piecewise")}
    alone = Alone(folder_of(name), temperature=0.0 if drafter == HEAD else 0.8, **plain)
    with company(name, mode, "overlap", {name: alone}, **settings, page_size=16) as engine:
        Churn(engine.llm)
        yield engine
    alone.shutdown()


@pytest.mark.parametrize("length", part(65, 1000))
@pytest.mark.parametrize("phase", PHASES if WHOLE else ["mixed", "decode"])
@pytest.mark.parametrize("path", PATHS)
def test_bits_do_not_depend_on_the_company(engine: InCompany, path: str, phase: str, length: int) -> None:
    check(engine, path, phase, length)


@pytest.mark.parametrize("mode", ["NONE", "FULL"])
@pytest.mark.parametrize("arch", [VL, HYBRID, INKLING])
def test_images(arch: str, mode: str, tmp_path: Path) -> None:
    alone = AloneWithImages(make_images(arch, tmp_path).folder, **TINY)
    check_images(alone, mode, CASES, page_size=16, **TINY)
    alone.shutdown()
