"""From milliseconds to modes: the fastest one at and between measured sizes, and what a start then captures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.graph.batches import decodes, mixed_batch
from weft.config import resolve
from weft.config.graph_modes import CudaGraphMode, GraphMode
from weft.config.graph_profile import (
    FORMAT,
    GraphProfile,
    Timing,
    default_path,
    differences,
    empty_profile,
    find_profile,
    read_profile,
    write_profile,
)
from weft.errors import ConfigError
from weft.graph.capture_sizes import CaptureSizes
from weft.graph.dispatcher import Choice, Dispatcher
from weft.pieces.mode_table import ModeTable, points_to_measure

NONE, PIECEWISE, FULL = GraphMode.NONE, GraphMode.PIECEWISE, GraphMode.FULL


def table(**kinds: dict[int, dict[str, float]]) -> ModeTable:
    timings = {kind: [Timing(n, ms) for n, ms in points.items()] for kind, points in kinds.items()}
    return ModeTable.of(GraphProfile(device="", model="", settings={}, versions={}, **timings))  # type: ignore[arg-type]


def test_points_are_the_ends_of_every_size_and_doublings_between() -> None:
    assert points_to_measure([]) == []
    assert points_to_measure([1, 2, 16, 64]) == [1, 2, 3, 6, 12, 16, 17, 34, 64]
    assert points_to_measure([64, 128, 256]) == [1, 64, 65, 128, 129, 256], "padded to less than twice"


def test_launches_one_by_one_take_the_time_of_the_host_until_the_device_is_slower() -> None:
    """14 ms of launches, or 3.5 us a token; a graph of 8,192 always takes 20. By one line over the whole size 5,000
    tokens would take 22 ms without a graph, and not 17.5."""
    points = points_to_measure([1024, 8192])
    found = table(prefill={n: {"NONE": max(14.0, 0.0035 * n), "FULL": 20.0} for n in points})
    assert found.mode(mixed_batch(5000)) is NONE and found.mode(mixed_batch(6000)) is FULL


def test_lines_cross_where_padding_stops_being_worth_it() -> None:
    """Without a graph 1 ms per token; a graph of 64 always takes 40: it wins from 40 on (by more than 1%, from 41)."""
    found = table(prefill={1: {"NONE": 1.0, "FULL": 40.0}, 64: {"NONE": 64.0, "FULL": 40.0}})
    assert found.prefill == ((40, NONE), (64, FULL))
    modes = {n: found.mode(mixed_batch(n)) for n in (1, 40, 41, 64, 65)}
    assert modes == {1: NONE, 40: NONE, 41: FULL, 64: FULL, 65: None}


def test_kinds_of_batches_have_their_own_limits() -> None:
    ms = {mode: {str(m): 1.0 + (m is not mode) for m in GraphMode} for mode in GraphMode}
    found = table(prefill={8: ms[FULL]}, mixed={8: ms[PIECEWISE]}, decode={4: ms[NONE]})
    assert found.mode(mixed_batch(8)) is FULL
    assert found.mode(mixed_batch(8, num_decodes=2)) is PIECEWISE
    assert found.mode(decodes(4)) is NONE
    assert found.mode(decodes(8)) is None


@pytest.mark.parametrize(
    ("ms", "mode"),
    [
        ({"NONE": 1.01, "PIECEWISE": 1.0, "FULL": 1.0}, NONE),
        ({"NONE": 1.02, "PIECEWISE": 1.01, "FULL": 1.0}, PIECEWISE),
        ({"NONE": 1.02, "PIECEWISE": 1.02, "FULL": 1.0}, FULL),
        ({"FULL": 3.0}, FULL),
    ],
)
def test_a_tie_goes_to_what_keeps_less_memory(ms: dict[str, float], mode: GraphMode) -> None:
    assert table(prefill={7: ms}).prefill == ((7, mode),)


def test_a_mode_that_is_captured_up_to_a_size_only() -> None:
    found = table(prefill={1: {"NONE": 9, "FULL": 1}, 64: {"NONE": 9, "FULL": 1}, 65: {"NONE": 9}, 130: {"NONE": 9}})
    assert found.prefill == ((64, FULL), (130, NONE))


def test_only_sizes_that_a_batch_will_run_in_are_captured() -> None:
    found = ModeTable(prefill=((20, NONE), (64, FULL)), mixed=((64, NONE),), decode=((3, FULL), (8, PIECEWISE)))
    assert found.token_sizes(FULL, [16, 24, 64, 130]) == [24, 64]
    assert found.token_sizes(PIECEWISE, [2, 4, 8, 16]) == [4, 8]
    assert found.decode_sizes([1, 2, 4, 8]) == [1, 2, 4]
    config = resolve(device="cpu", cuda_graph_mode="FULL_AND_PIECEWISE", piecewise_cuda_graph_tokens=[8, 24])
    sizes = CaptureSizes.of(config, 2, found)
    assert (sizes.decode, sizes.forward, sizes.pieces, sizes.samples) == ([1, 2], [], [8], [1, 2])
    assert CaptureSizes.of(config, 2, ModeTable(((64, NONE),), ((64, NONE),), ((9, NONE),))).samples == ()


# -- dispatch --------------------------------------------------------------------------------------------------------

SIZES: dict[str, Any] = {"decode_sizes": (4,), "token_sizes": (64,), "full_token_sizes": (64, 210)}


def test_measured_modes_go_before_rules_and_padding() -> None:
    found = ModeTable(prefill=((7, PIECEWISE), (31, NONE), (210, FULL)), decode=((2, NONE), (4, FULL)))
    dispatcher = Dispatcher(CudaGraphMode.TUNED, **SIZES, table=found)
    assert dispatcher.choose(mixed_batch(7)) == Choice(PIECEWISE, 64)
    assert dispatcher.choose(mixed_batch(31)) == Choice(NONE, 31)
    assert dispatcher.choose(mixed_batch(65)) == Choice(FULL, 210)
    assert dispatcher.choose(decodes(2)) == Choice(NONE, 2)
    assert dispatcher.choose(decodes(3)) == Choice(FULL, 4)


def test_what_was_not_measured_goes_by_the_rules() -> None:
    dispatcher = Dispatcher(CudaGraphMode.TUNED, **SIZES, table=ModeTable(prefill=((16, NONE),)))
    assert dispatcher.choose(mixed_batch(40)) == Choice(FULL, 64)
    assert dispatcher.choose(mixed_batch(31, num_decodes=1)) == Choice(NONE, 31)
    assert dispatcher.choose(mixed_batch(211)) == Choice(NONE, 211)


def test_a_measured_graph_that_cannot_take_the_batch_is_not_taken() -> None:
    dispatcher = Dispatcher(CudaGraphMode.TUNED, **SIZES, table=ModeTable.always(FULL, 64))
    assert dispatcher.choose(mixed_batch(64, num_prefills=17, num_chunks=17)) == Choice(NONE, 64)


# -- files -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A profile where a start on the CPU looks for it."""
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path))
    profile = wanted()
    write_profile(profile, default_path(profile))
    return default_path(profile)


def wanted(**settings: Any) -> GraphProfile:
    config = resolve(device="cpu", cuda_graph_mode="FULL_AND_PIECEWISE", **settings)
    values = {name: getattr(config, name) for name in config.__slots__}
    return empty_profile(values, config.model_config)


def test_a_start_uses_the_stored_profile(stored: Path) -> None:
    config = resolve(device="cpu")
    assert (config.cuda_graph_mode, config.graph_profile) == ("TUNED", str(stored))
    assert "weft tune" in config.reasons["graph_profile"] and config.reasons["cuda_graph_mode"] == "graph_profile"


@pytest.mark.parametrize(
    ("settings", "mode"),
    [
        ({"cuda_graph_mode": "PIECEWISE"}, "PIECEWISE"),
        ({"cuda_graph_mode": "NONE"}, "NONE"),
        ({"enforce_eager": True}, "NONE"),
        ({"enable_piecewise_cuda_graph": True}, "PIECEWISE"),
        ({"enable_piecewise_cuda_graph": False}, "NONE"),
        ({"graph_profile": "none"}, "NONE"),
    ],
)
def test_a_named_mode_overrides_it(stored: Path, settings: dict[str, Any], mode: str) -> None:
    config = resolve(device="cpu", **settings)
    assert (config.cuda_graph_mode, config.graph_profile) == (mode, None)
    assert next(iter(settings)) in config.reasons["graph_profile"] or config.reasons["graph_profile"] == "asked for"


def test_a_profile_for_other_settings_is_not_used_and_says_why(stored: Path) -> None:
    config = resolve(device="cpu", max_num_seqs=7)
    assert (config.cuda_graph_mode, config.graph_profile) == ("NONE", None)
    assert "max_num_seqs was 128 and is 7" in config.reasons["graph_profile"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dtype", "bfloat16"),
        ("mamba_ssm_dtype", "bfloat16"),
        ("kv_cache_dtype", "fp8"),
        ("enable_expert_parallel", True),
        ("disable_custom_all_reduce", True),
        ("page_size", 8),
        ("max_model_len", 64),
        ("max_num_batched_tokens", 999),
        ("cuda_graph_bs", [3]),
        ("cuda_graph_max_bs", 3),
        ("piecewise_cuda_graph_tokens", [9]),
        ("piecewise_cuda_graph_max_tokens", 9),
        ("piecewise_cuda_graph_compiler", "eager"),
        ("splitting_ops", ["gated_delta_net"]),
        ("enable_torch_compile", True),
    ],
)
def test_a_profile_for_one_other_setting_does_not_fit(name: str, value: Any) -> None:
    misfits = differences(wanted(tensor_parallel_size=2), wanted(tensor_parallel_size=2, **{name: value}))
    assert any(text.startswith(f"{name} was ") for text in misfits)


def test_a_named_profile(stored: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "mine.json"
    stored.rename(elsewhere)
    assert resolve(device="cpu").graph_profile is None
    assert resolve(device="cpu", graph_profile=str(elsewhere)).cuda_graph_mode == "TUNED"
    with pytest.raises(
        ConfigError, match="measured for something else: max_num_seqs was 128 and is 7; run `weft tune`"
    ):
        resolve(device="cpu", graph_profile=str(elsewhere), max_num_seqs=7)
    with pytest.raises(ConfigError, match=r"graph_profile=.*contradicts cuda_graph_mode='FULL'"):
        resolve(device="cpu", graph_profile=str(elsewhere), cuda_graph_mode="FULL")
    with pytest.raises(ConfigError, match=r"graph_profile=.*contradicts enable_piecewise_cuda_graph=False"):
        resolve(device="cpu", graph_profile=str(elsewhere), enable_piecewise_cuda_graph=False)
    with pytest.raises(ConfigError, match="cannot be read"):
        resolve(device="cpu", graph_profile=str(tmp_path / "absent.json"))
    for name in ("~no-such-user/x", "x\0y"):
        with pytest.raises(ConfigError, match="cannot be read"):
            resolve(device="cpu", graph_profile=name)


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"format": "1"}', "\x00"])
def test_a_damaged_profile(stored: Path, text: str) -> None:
    stored.write_text(text)
    assert "is not a profile" in resolve(device="cpu").reasons["graph_profile"]
    with pytest.raises(ConfigError, match=r"is not a profile.*weft tune"):
        resolve(device="cpu", graph_profile=str(stored))


def test_a_profile_of_another_format_version_or_model(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored.write_text(stored.read_text().replace(f'"format": {FORMAT}', f'"format": {FORMAT + 1}'))
    with pytest.raises(ConfigError, match=f"format {FORMAT + 1}, this Weft reads {FORMAT}"):
        read_profile(stored)
    ours = wanted()
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.0")
    assert any(text.startswith("torch was") for text in differences(ours, wanted()))
    assert differences(ours, ours) == []


def test_without_a_profile_the_reason_names_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path))
    config = resolve(device="cpu")
    found = find_profile({}, config.model_config)
    assert found == (None, config.reasons["graph_profile"]) and "weft tune" in found[1]


def test_a_profile_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be written"):
        write_profile(wanted(), tmp_path / "file" / "p.json")
