"""The rules, as a table."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.graph.batches import decodes, mixed_batch
from weft.config.graph_modes import CudaGraphMode, GraphMode
from weft.errors import ConfigError
from weft.graph.batch_descriptor import MAX_PREFILLS, BatchDescriptor, chunk_capacity
from weft.graph.capture_sizes import token_sizes
from weft.graph.dispatcher import Choice, Dispatcher, smallest_fitting

NONE, PIECEWISE, FULL = GraphMode.NONE, GraphMode.PIECEWISE, GraphMode.FULL
SIZES = {"decode_sizes": (1, 4, 8), "token_sizes": (16, 64, 210)}
DECODE = [1, 3, 8, 9, 130]
"""Batch sizes; 9 and more fit no decode graph."""
MIXED = [1, 7, 8, 17, 31, 32, 65, 104, 105, 210, 211]
"""Token counts: 7, 31 and 104 would be padded to more than twice their size, 211 fits nothing."""


@pytest.mark.parametrize(
    ("mode", "decode", "mixed"),
    [
        ("NONE", [1, 3, 8, 9, 130], MIXED),
        ("FULL_DECODE_ONLY", ["F1", "F4", "F8", 9, 130], MIXED),
        ("FULL", ["F1", "F4", "F8", 9, 130], MIXED),
        ("PIECEWISE", [1, 3, "P16", "P16", "P210"], [1, 7, "P16", 17, 31, "P64", 65, 104, "P210", "P210", 211]),
        (
            "FULL_AND_PIECEWISE",
            ["F1", "F4", "F8", "P16", "P210"],
            [1, 7, "P16", 17, 31, "P64", 65, 104, "P210", "P210", 211],
        ),
    ],
)
def test_rules(mode: str, decode: list[int | str], mixed: list[int | str]) -> None:
    dispatcher = Dispatcher(CudaGraphMode(mode), **SIZES)  # type: ignore[arg-type]
    assert [code(dispatcher.choose(decodes(n))) for n in DECODE] == decode
    assert [code(dispatcher.choose(mixed_batch(n))) for n in MIXED] == mixed


def code(choice: Choice) -> int | str:
    return choice.size if choice.mode is NONE else f"{choice.mode[0]}{choice.size}"


def test_full_graphs_for_any_batch_where_they_exist() -> None:
    dispatcher = Dispatcher(CudaGraphMode.FULL, (1,), (), (64,))
    assert dispatcher.choose(mixed_batch(40)) == Choice(FULL, 64)
    assert dispatcher.choose(mixed_batch(31)) == Choice(NONE, 31)


def test_a_graph_takes_as_many_prefills_and_chunks_as_it_has_room_for() -> None:
    dispatcher, room = Dispatcher(CudaGraphMode.FULL, (), (), (210,)), chunk_capacity(210)
    for num_prefills, num_chunks, mode in (
        (MAX_PREFILLS, room, FULL),
        (MAX_PREFILLS + 1, room, NONE),
        (1, room + 1, NONE),
    ):
        batch = mixed_batch(200, num_prefills=num_prefills, num_chunks=num_chunks)
        assert dispatcher.choose(batch).mode is mode


def test_nothing_captured_means_nothing_replayed() -> None:
    for mode in CudaGraphMode:
        for batch in (decodes(5), mixed_batch(5), BatchDescriptor.verification(5, 1, 64)):
            assert Dispatcher(mode).choose(batch) == Choice(NONE, 5)


@pytest.mark.parametrize("mode", ["FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE", "TUNED"])
def test_a_verification_runs_in_a_graph_of_as_many_drafts(mode: str) -> None:
    """Larger batches may verify fewer: one of three does not fit a graph of four that have fewer tokens each."""
    captured = {1: 4, 2: 4, 4: 2}
    dispatcher = Dispatcher(CudaGraphMode(mode), [8], [64], [64], verification_sizes=captured)
    sizes = [(seqs, query_len) for seqs in (1, 2, 3, 4, 5) for query_len in (2, 4)]
    chosen = [code(dispatcher.choose(BatchDescriptor.verification(*size, 64))) for size in sizes]
    assert chosen == [2, "F1", 4, "F2", "F4", 12, "F4", 16, 10, 20]


def rules_table() -> str:
    """The rules in Markdown, for the docs."""
    lines = ["| mode | decode | prefill and mixed |", "|---|---|---|"]
    for mode in CudaGraphMode:
        cells = (", else ".join([*wanted, GraphMode.NONE]) for wanted in (mode.decode, mode.mixed))
        lines.append(f"| {mode} | {' | '.join(cells)} |")
    return "\n".join(lines)


def test_the_table_in_the_docs_is_the_code() -> None:
    page = (Path(__file__).parents[2] / "docs" / "cuda-graphs.md").read_text(encoding="utf-8")
    assert rules_table() in page, "put what rules_table() gives into docs/cuda-graphs.md"
    assert "| FULL_AND_PIECEWISE | FULL, else PIECEWISE, else NONE | PIECEWISE, else NONE |" in rules_table()


def test_token_sizes() -> None:
    assert token_sizes(100) == [1, 2, 4, 8, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 100]
    assert token_sizes(8192)[-3:] == [6144, 7168, 8192] and token_sizes(3) == [1, 2, 3]
    assert token_sizes(8192, largest=20) == [1, 2, 4, 8, 16, 20]
    assert token_sizes(100, given=[64, 16, 64, 200]) == [16, 64]
    with pytest.raises(ConfigError, match="piecewise_cuda_graph_tokens"):
        token_sizes(8, given=[16])
    for limit in (1, 17, 130, 1000):
        sizes = token_sizes(limit)
        assert sizes == sorted(set(sizes)) and sizes[-1] == limit
        for wanted in range(1, limit + 1):
            size = smallest_fitting(sizes, wanted)
            assert size is not None and size < 2 * wanted and (wanted < 16 or size <= 1.25 * wanted)
