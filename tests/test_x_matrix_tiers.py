"""The combinations of ``test_x_matrix.py`` for prefixes that come back from host memory, in every kind of layer."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import test_x_matrix_fp8 as fp8
from tests import test_x_matrix_images as images
from tests import x_matrix as matrix
from tests.whole import covering, takes_long, unless_long

MODES = [("NONE", "overlap"), ("FULL", "in turn")]
if matrix.WHOLE:
    MODES = [(mode, overlap) for mode in matrix.MODES for overlap in matrix.OVERLAP]
COLUMNS: list[tuple[str, str, str, dict[str, Any]]] = [
    (arch, *mode, {}) for arch, mode in covering((*matrix.ARCHITECTURES, matrix.WITH_HEAD), MODES, of=1)
]
COLUMNS += unless_long([], [(matrix.HYBRID, "NONE", "overlap", {"tensor_parallel_size": 2})])
# In CI two ranks are in tests/offload/test_ranks.py.
COLUMNS += [(matrix.HYBRID, "NONE", "overlap", {"kv_offloading_policy": "write_through_selective"})]
KINDS = ["Lfm2", "Bamba", "GptOss", "KimiLinear", "Mamba2", "Jamba", "MiniMax", "BailingHybrid"]
KINDS = [f"{kind}ForCausalLM" for kind in unless_long(KINDS, [*KINDS, "Zaya", "Inkling", "Inkling2", "Qwen4Exp"])]
KINDS += unless_long([], ["Glm5NextForConditionalGeneration"])


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, matrix.Reference]:
    archs = {arch for arch, *_ in COLUMNS} | {*KINDS}
    return {arch: matrix.make_reference(arch, tmp_path_factory.mktemp("reference")) for arch in archs}


@pytest.fixture(scope="module", params=COLUMNS, ids=lambda column: "-".join(map(str, column)))
def engine(request: pytest.FixtureRequest, references: dict[str, matrix.Reference]) -> Iterator[matrix.Poisoned]:
    arch, mode, overlap, more = request.param
    settings: dict[str, Any] = {"kv_offloading_size": 0.05} | more
    if arch == matrix.WITH_HEAD:
        settings["speculative_config"] = matrix.drafts_of(arch)
    with matrix.open_engine(arch, mode, overlap, "capture", references, **settings) as engine:
        yield engine


@pytest.mark.parametrize(("phase", "length"), covering(matrix.PHASES, matrix.part(65, 210), of=1))
def test_tokens_are_those_of_the_reference(engine: matrix.Poisoned, phase: str, length: int) -> None:
    if engine.llm.config.kv_offloading_policy == "write_through_selective":
        check_selective(engine, phase, length)
    elif engine.llm.config.speculative_config is None:
        matrix.check(engine, "restored", phase, length)
    else:  # drafts decide which sequences share a step
        matrix.check_drafts(engine, "restored", length)
    stats = engine.llm.stats()
    assert length == 1 or (stats.num_restores and stats.num_external_hit_tokens), "a token alone has no prefix"


def check_selective(engine: matrix.Poisoned, phase: str, length: int) -> None:
    """A prefix that was reused once comes back."""
    prompt, salt = engine.prompt_of(length), engine.begin()
    for _ in range(2):
        engine.run(prompt, 6, salt)
    engine.evict_all()
    engine.steps.clear()
    request, _ = matrix.RUNS[phase](engine, prompt, salt)
    engine.reference.check(prompt, request.output_token_ids)
    assert request.num_cached_tokens == length - 1


@pytest.mark.parametrize("arch", KINDS)
def test_every_kind_of_layer_comes_back(arch: str, references: dict[str, matrix.Reference]) -> None:
    with matrix.open_engine(arch, "NONE", "overlap", "capture", references, kv_offloading_size=0.2) as engine:
        matrix.check(engine, "restored", "mixed", 129)
        assert engine.llm.stats().num_external_hit_tokens


@pytest.mark.parametrize("kind", [pytest.param("weights", marks=takes_long), "kv", "kv, no states"])
def test_fp8_comes_back(kind: str, tmp_path: Path) -> None:
    """Weights in FP8, or keys and values."""
    more: dict[str, Any] = {} if kind == "weights" else {"kv_cache_dtype": "fp8"}
    references = {kind: fp8.make_reference(kind, tmp_path)}
    with matrix.open_engine(kind, "FULL", "overlap", "capture", references, kv_offloading_size=0.1, **more) as engine:
        for phase, length in (("prefill", 129), ("mixed", 65), ("decode", 210)):
            matrix.check(engine, "restored", phase, length)
        assert engine.llm.stats().num_external_hit_tokens


@pytest.mark.parametrize("arch", [images.VL, images.HYBRID])
def test_images_come_back(arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the prefix ends inside an image. Another image of the same size is a miss."""
    references, column = {arch: images.make_reference(arch, tmp_path)}, (arch, "NONE", "overlap", "exact")
    with images.open_column(column, references, kv_offloading_size=0.1) as engine:
        for phase, prompt in (("prefill", 2), ("mixed", 3), ("decode", 1)):
            matrix.check(engine, "restored", phase, prompt)
        assert engine.llm.stats().num_external_hit_tokens
        tokens, salt = engine.prompt_of(1), engine.begin()
        engine.run(tokens, 2, salt)
        engine.evict_all()
        make = images.item
        monkeypatch.setattr(images, "item", lambda kind, grid, seed, *more: make(kind, grid, seed + 1, *more))
        num_cached = engine.run(tokens, 2, salt).num_cached_tokens
        assert num_cached is not None and num_cached <= tokens.index(images.IMAGE)


@pytest.mark.parametrize("arch", [images.VL, images.HYBRID])
def test_images_come_back_with_drafts(arch: str, tmp_path: Path) -> None:
    references, column = {arch: images.make_reference(arch, tmp_path)}, (arch, "NONE", "overlap", "exact")
    drafts = {"method": "ngram", "num_speculative_tokens": 3}
    with images.open_column(column, references, kv_offloading_size=0.1, speculative_config=drafts) as engine:
        matrix.install_drafter(engine, arch)
        matrix.check_drafts(engine, "restored", 1)
        stats = engine.llm.stats()
        assert stats.num_external_hit_tokens and stats.spec_decode_num_accepted_tokens


@pytest.mark.parametrize("has_files", [False, True])
def test_a_reset_empties_all_tiers(has_files: bool, references: dict[str, matrix.Reference], tmp_path: Path) -> None:
    settings: dict[str, Any] = {"kv_offloading_size": 0.1} | ({"kv_offloading_dir": tmp_path} if has_files else {})
    with matrix.open_engine(matrix.HYBRID, "NONE", "in turn", "capture", references, **settings) as engine:
        prompt, salt = engine.prompt_of(129), engine.begin()

        def files_are(there: bool) -> None:
            for _ in range(200):
                if bool(list(tmp_path.glob("*/*/*"))) == there:
                    return
                engine.run([1, 2], 2, "others")
                time.sleep(0.01)
            raise AssertionError(f"files: {not there}")

        engine.run(prompt, 2, salt)
        engine.evict_all()
        files_are(has_files)
        assert engine.run(prompt, 2, salt).num_cached_tokens == 128
        assert engine.llm.reset_prefix_cache()
        assert engine.run(prompt, 2, salt).num_cached_tokens == 0
        files_are(False)
        assert engine.llm.stats().num_external_hit_tokens == 128
