"""Sources of pieces: traced and compiled passes break, replay and compute as the model does, and are found on disk."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule

from tests.pieces.fake_model import SIZE, Model, context_of
from tests.pieces.scribble import num_bytes, scribble_buffers
from tests.pieces.test_capture import SIZES, AllAtOnce, Pieces, eager, random_lengths
from tests.whole import RUNS_LONG, takes_long
from weft.errors import ConfigError
from weft.forward_context import forward_context, get_forward_context
from weft.graph.graph import Tape
from weft.graph.split_ops import known_split_ops
from weft.pieces.inductor import PieceCompiler, code_of
from weft.pieces.sources import CompileCounters, Traced, run_eagerly
from weft.pieces.tracing import split_graph, trace

CPU = torch.device("cpu")


def make(name: str, folder: Path) -> Traced:
    if name == "eager":
        return Traced(CPU, run_eagerly, frozenset())
    compiler = PieceCompiler(CPU, folder)
    return Traced(CPU, compiler, frozenset(), compiler.counters)


def prepared_pieces(model: Model, source: Traced | None) -> Pieces:
    return Pieces(model, source.prepare(model, context_of([1], {}), max(SIZES)) if source is not None else None)


@pytest.fixture
def model() -> Model:
    return Model().requires_grad_(False)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Pieces, CompileCounters]:
    """A folder, the pieces compiled for this folder, and the counters of the start."""
    folder = tmp_path_factory.mktemp("compiled")
    first = make("inductor", folder)
    return folder, prepared_pieces(Model().requires_grad_(False), first), first.counters


@pytest.fixture
def folder(compiled: tuple[Path, Pieces, CompileCounters]) -> Path:
    return compiled[0]


@pytest.mark.parametrize("name", ["capture", *(pytest.param(name, marks=takes_long) for name in ("eager", "inductor"))])
def test_sizes_in_random_order_with_memory_churn_equal_eager(model: Model, name: str, folder: Path) -> None:
    pieces, rng = prepared_pieces(model, make(name, folder) if name != "capture" else None), random.Random(4)
    kept, count = [], 150 if RUNS_LONG else 30
    for _ in range(count):
        size = rng.choice(SIZES)
        num_tokens = rng.randint(1, size)
        ids, lengths = torch.randint(50, (num_tokens,)), random_lengths(num_tokens, rng)
        pieces.pool.scribble()
        scribble_buffers(pieces.source.buffers)
        kept.append(torch.full((rng.randint(1, 4000),), torch.nan))
        torch.testing.assert_close(pieces.run(ids, lengths, size), eager(model, ids, lengths), rtol=1e-5, atol=1e-5)
    assert pieces.runs.counters.captures == len(SIZES) and pieces.runs.counters.replays == count
    # One input, one output, one result, whatever the source.
    assert num_bytes(pieces.source.buffers) == 3 * max(SIZES) * SIZE * 4


def test_outputs_that_live_together_do_not_share_memory(tmp_path: Path) -> None:
    model = AllAtOnce().requires_grad_(False)
    pieces, ids = prepared_pieces(model, make("eager", tmp_path)), torch.randint(50, (63,))
    torch.testing.assert_close(pieces.run(ids, [20, 43], 64), eager(model, ids, [20, 43]), rtol=0, atol=1e-6)
    # Two outputs live together; the graph forgets them before the third, where Python's variables would not.
    assert num_bytes(pieces.source.buffers) == (1 + 2 + 1) * max(SIZES) * SIZE * 4


def test_a_prepared_model_outside_of_pieces_is_the_model(model: Model, tmp_path: Path) -> None:
    forward = make("eager", tmp_path).prepare(model, context_of([1], {}), 4)
    ids = torch.arange(7)
    with forward_context(context_of([3, 4], model.table())):
        assert torch.equal(forward(input_ids=ids), model(ids))


def test_each_distinct_piece_is_compiled_once_and_found_at_the_next_start(
    compiled: tuple[Path, Pieces, CompileCounters]
) -> None:  # fmt: skip
    """Layers that are built alike share their code; other weights do not matter. A damaged file is compiled anew."""
    folder, pieces, counters = compiled
    assert counters == CompileCounters(compiled=2, cache_hits=0, reused=2)
    other = Model().requires_grad_(False)
    other.embed.weight.mul_(2)
    second = make("inductor", folder)
    again = prepared_pieces(other, second)
    assert second.counters == CompileCounters(compiled=0, cache_hits=2, reused=2)
    ids = torch.randint(50, (64,))
    for each in (pieces, again):
        torch.testing.assert_close(each.run(ids, [64], 64), eager(each.model, ids, [64]), rtol=1e-5, atol=1e-5)
    next(folder.glob("*/artefact")).write_bytes(b"cut short")
    third = make("inductor", folder)
    third.prepare(other, context_of([1], {}), 130)
    assert third.counters == CompileCounters(compiled=1, cache_hits=1, reused=2)


@pytest.mark.parametrize("what", ["torch", "weft", "triton", "python", "device"])
def test_another_version_or_device_finds_nothing(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """An artefact holds for the versions and the processor that it was made with."""
    from weft.pieces import inductor

    graph = split_graph(trace(model, context_of([1], {}), CPU, 8).graph, known_split_ops())[1][0].graph
    before = PieceCompiler(CPU, tmp_path)._key(graph)
    assert PieceCompiler(CPU, tmp_path)._key(graph) == before
    if what == "python":
        monkeypatch.setattr("sys.version", "3.99")
    elif what == "device":
        monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "another")
    else:
        version = inductor._version
        monkeypatch.setattr(inductor, "_version", lambda name: "9.9" if name == what else version(name))
    assert PieceCompiler(CPU, tmp_path)._key(graph) != before


def test_a_compiled_piece_is_one_operation_to_the_recorder(model: Model, folder: Path) -> None:
    pieces = prepared_pieces(model, make("inductor", folder))
    graph = pieces.runs.sequence(max(SIZES))
    tapes = [step for step in graph.steps if isinstance(step, Tape)]
    assert len(tapes) == 4
    for tape in tapes:
        names = [step[0].name() for step in tape.steps]
        assert names[0] == "weft::compiled_piece" and set(names[1:]) <= {"aten::copy_"}


def parts(model: Model) -> list[str]:
    """The code of the pieces of a model."""
    _, items = split_graph(trace(model, context_of([1], {}), CPU, 8).graph, known_split_ops())
    return [code_of(item.graph) for item in items if item.op is None]


def test_code_tells_pieces_apart_by_what_they_compute(model: Model) -> None:
    plain = parts(model)
    assert len(plain) == 4 and plain[1] == plain[2] != plain[0] and parts(Model().requires_grad_(False)) == plain
    half = parts(Model().requires_grad_(False).half())
    assert not set(half) & set(plain), "dtypes count"

    class Scaled(Model):
        def forward(self, input_ids: Tensor) -> Tensor:
            return super().forward(input_ids) * 3

    assert parts(Scaled().requires_grad_(False))[:-1] == plain[:-1]
    assert parts(Scaled().requires_grad_(False))[-1] != plain[-1]


def test_code_tells_pieces_apart_by_keywords_and_strides() -> None:
    def code(strides: tuple[int, int], **keywords: int) -> str:
        graph = Graph()
        x = graph.placeholder("x")
        x.meta["example_value"] = torch.empty_strided((3, 4), strides)
        graph.output((graph.call_function(torch.sum, (x,), keywords),))
        return code_of(GraphModule({}, graph))

    codes = [code((4, 1)), code((1, 3)), code((4, 1), dim=0), code((4, 1), dim=1)]
    assert len(set(codes)) == 4 and code((4, 1), dim=1) == codes[-1]


class Peeking(Model):
    """A model that may do something that cannot be traced."""

    def __init__(self, peek: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.peek = peek

    def forward(self, input_ids: Tensor) -> Tensor:
        return super().forward(input_ids) + self.peek(input_ids)


@pytest.mark.parametrize(
    ("peek", "message"),
    [
        (lambda ids: ids.float().mean() if ids.shape[0] > 20 else ids.float().sum(), "decides by the number of tokens"),
        (lambda ids: ids.float().mean() if ids.shape[0] == 8 else ids.float().sum(), "cannot be traced"),
        (lambda ids: ids[:, None] * ids.max().item(), "the host waits for"),
        (lambda ids: ids[ids > 3].sum(), "the host waits for"),
        (lambda ids: ids.float().sum() if ids.tolist()[0] else ids.float().mean(), "cannot be traced"),
        (lambda ids: get_forward_context().batch.seq_lens.sum(), r"batch\.seq_lens outside of a split op"),
    ],
)
def test_what_cannot_be_traced_is_refused(peek: Callable[[Tensor], Tensor], message: str) -> None:
    model = Peeking(peek).requires_grad_(False)
    with pytest.raises(ConfigError, match=f"{message}.*piecewise_cuda_graph_compiler='capture'"):
        trace(model, context_of([3], {}), CPU, 8)


def test_without_a_compiler_inductor_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", str(tmp_path / "nothing"))
    with pytest.raises(ConfigError, match=r"needs a C\+\+ compiler.*nothing.*install g\+\+.*'capture'"):
        PieceCompiler(CPU, tmp_path)


def test_the_process_keeps_its_cache_settings(model: Model, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "mine")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    make("inductor", folder).prepare(model, context_of([1], {}), 130)
    assert os.environ["TRITON_CACHE_DIR"] == "mine" and str(folder) not in os.environ.get("TORCHINDUCTOR_CACHE_DIR", "")


@takes_long
def test_an_artefact_that_cannot_be_written_costs_the_next_start_only(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("weft.pieces.inductor._ARTEFACT", "no/such/folder")
    source = make("inductor", tmp_path)
    with caplog.at_level(logging.WARNING, "weft"):
        source.prepare(model, context_of([1], {}), 130)
    assert "cannot be kept for the next start" in caplog.text and source.counters.compiled == 2


def test_a_folder_that_cannot_be_made_is_replaced_for_this_start(
    model: Model, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING, "weft"):
        compiler = PieceCompiler(CPU, tmp_path / "file" / "pieces")
    assert "cannot be made" in caplog.text and "WEFT_CACHE_DIR" in caplog.text
    assert compiler.folder.is_dir()
