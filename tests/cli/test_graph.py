"""``weft graph`` on the emulator: what was captured, part by part, and a page that needs nothing else."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from tests.cli.conftest import RunWeft
from tests.tiny import make_checkpoint
from tests.whole import takes_long
from weft.bench.graph_dump import GraphDump, Part, dump_graphs, launches_noted
from weft.cli import main
from weft.cli.graph_picture import fold, page
from weft.config import resolve
from weft.graph.graph import EmulatedGraphPool, Tape, capture
from weft.pieces.op_recorder import GraphWithOps, Operation, OpRecordingPool, Stopwatch

SMALL = ["--device", "cpu", "--cpu-cache-gib", "0.05", "--max-num-seqs", "2", "--max-num-batched-tokens", "65"]


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model's pass, by the command line."""
    folder = tmp_path_factory.mktemp("dump")
    assert main(["graph", "--dump", str(folder), "--tokens", "63", *SMALL]) == 0
    return folder


@takes_long
def test_a_pass_may_be_larger_than_what_a_start_captures() -> None:
    settings: dict[str, Any] = {"max_num_seqs": 1, "max_num_batched_tokens": 600, "max_model_len": 600}
    config = resolve(device="cpu", load_format="dummy", cuda_graph_mode="PIECEWISE", cpu_cache_gib=0.05, **settings)
    assert config.piecewise_cuda_graph_max_tokens == 512 and dump_graphs(config, 520).num_tokens == 520


def test_one_file_per_piece_and_a_piece_more_than_breaks(dump: Path) -> None:
    figures = json.loads((dump / "graph.json").read_text())
    parts = figures["parts"]
    breaks = [part for part in parts if not part["captured"]]
    assert [part["name"] for part in breaks] == ["attention"] * len(breaks) and len(breaks) == 2
    assert [part["captured"] for part in parts] == [True, False] * 2 + [True]
    names = {path.name for path in dump.iterdir()}
    assert names == {"graph.html", "graph.json", "piece_0.py", "piece_1.py", "piece_2.py"}
    assert figures["num_tokens"] == 63 and figures["versions"]["torch"]
    assert all(part["ms"] > 0 for part in parts)
    assert all(part["bytes"] > 0 and part["kernels"] > 0 for part in parts if part["captured"])
    caches = 0.05 * 2**30
    assert all(part["bytes"] < caches for part in parts), "a cache was counted whole"


def test_the_code_reads_as_python_and_names_what_it_uses(dump: Path) -> None:
    code = (dump / "piece_1.py").read_text()
    (function,) = ast.parse(code).body
    assert isinstance(function, ast.FunctionDef) and function.name == "piece_1"
    assert "attention_output" in [argument.arg for argument in function.args.args]
    assert 'aten.linear(attention_output, weights["model.layers.3.self_attn.o_proj.weight"])' in code
    assert "# float32[63, 256]" in code and 'caches["model.layers.4.linear_attn.conv"]' in code
    assert "aten.copy_(attention_input_0, v" in code
    made = {"attention_output", *(argument.arg for argument in function.args.args)}
    for statement in function.body:  # everything is made before it is used
        used = {n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
        assert {name for name in used if re.fullmatch(r"v\d+", name)} <= made
        made |= {n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}


def test_the_page_is_well_formed_and_complete_in_itself(dump: Path) -> None:
    text = (dump / "graph.html").read_text(encoding="utf-8")
    root = ElementTree.fromstring(text.removeprefix("<!DOCTYPE html>"))
    assert not re.search(r"https?:|//|url\(|@import|<script|\bsrc=|\bhref=", text)
    picture = root.find(".//svg")
    assert picture is not None and len(picture.findall("g")) == 5
    words = " ".join(picture.itertext())
    assert "piece_1: " in words and "model.layers.3.self_attn" in words and "aten.linear" in words
    assert len(root.findall(".//details")) == 3


def test_the_page_escapes(tmp_path: Path) -> None:
    parts = (Part("<b>&", "", True, (), 0, 1.0), Part('"x"<', "<i>", False, (), 0, 1.0), Part("p", "", True, (), 0, 0))
    text = page("a < b & c", [("<u>", "'&'")], GraphDump(7, parts, {}, ("if a < b: pass",)))
    ElementTree.fromstring(text.removeprefix("<!DOCTYPE html>"))
    for raw in ("<b>", "<i>", "<u>", "a < b"):
        assert raw not in text


def test_layers_that_repeat_are_folded() -> None:
    def part(name: str) -> Part:
        return Part(name, "", True, (), 0, 1.0)

    pairs = [p for i in range(3) for p in (part_named("attention", i), part(f"piece_{i + 1}"))]
    last = [part_named("mixer", 9), part("piece_4")]
    folds = fold([part("piece_0"), *pairs, *last])
    assert [one.count for one in folds] == [1, 3, 1]
    assert [p.name for p in folds[1].rows[1]] == ["piece_1", "piece_2", "piece_3"]


def part_named(op: str, layer: int) -> Part:
    return Part(op, f"layers.{layer}", False, (), 0, 1.0)


def test_equal_layers_of_a_model_are_equal(tmp_path: Path) -> None:
    checkpoint = make_checkpoint("Qwen3ForCausalLM", tmp_path, num_hidden_layers=4)
    config = resolve(model=str(checkpoint), device="cpu", cuda_graph_mode="PIECEWISE", skip_tokenizer_init=True)
    found = dump_graphs(config, 7)
    assert [one.count for one in fold(found.parts)] == [1, 3, 1]
    first, *middle, last = (piece.signature for piece in found.pieces)
    assert len(set(middle)) == 1 and len({first, middle[0], last}) == 3


@takes_long
@pytest.mark.parametrize("source", [pytest.param("capture", marks=takes_long), "eager"])
def test_the_notes_are_what_the_tape_replays(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[tuple[list[str], list[str]]] = []
    make = GraphWithOps.__init__

    def noting(self: GraphWithOps, graph: Tape, operations: Sequence[Operation], stopwatch: Stopwatch) -> None:
        make(self, graph, operations, stopwatch)
        tape = [str(func).removesuffix(".default") for func, *_ in graph.steps]
        found.append((tape, [o.name for o in self.operations if o.is_kernel]))

    monkeypatch.setattr(GraphWithOps, "__init__", noting)
    settings: dict[str, Any] = {"skip_tokenizer_init": True, "cpu_cache_gib": 0.05, "max_num_seqs": 2}
    settings["piecewise_cuda_graph_compiler"] = source
    pieces = dump_graphs(resolve(device="cpu", cuda_graph_mode="PIECEWISE", **settings), 5)
    assert len(found) == 1 + len(pieces.pieces), "sampling, and every piece"
    assert all(tape == notes and tape for tape, notes in found)
    assert bool(pieces.traced) == (source == "eager")


def test_listed_graphs_compute_what_they_did() -> None:
    pool = OpRecordingPool(EmulatedGraphPool(), torch.device("cpu"))
    x = torch.arange(6.0).view(2, 3)
    graph, y = capture(pool, lambda: (x.t() @ x).add_(1.0))
    assert isinstance(graph, GraphWithOps)
    assert [o.name for o in graph.operations if o.is_kernel] == ["aten.mm", "aten.add_.Tensor"]
    product = graph.operations[1]
    assert product.num_bytes() == 4 * (6 + 6 + 9) and product.num_bytes({product.inputs[0].storage}) == 4 * 9
    assert graph.operations[2].code({}) == "aten.add_.Tensor(v2, 1.0)"
    x.fill_(2.0)
    pool.stopwatch.on = True
    graph.replay()
    assert torch.equal(y, torch.full((3, 3), 9.0)) and len(pool.stopwatch.laps) == 1


def test_a_capture_that_fails_leaves_nothing_on() -> None:
    pool = OpRecordingPool(EmulatedGraphPool(), torch.device("cpu"))
    with pytest.raises(RuntimeError, match="captured graph"):
        capture(pool, lambda: torch.ones(3).sum().item())
    graph, _ = capture(pool, lambda: torch.ones(3) + 1)
    assert isinstance(graph, GraphWithOps)
    assert [o.name for o in graph.operations if o.is_kernel] == ["aten.ones", "aten.add.Tensor"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--tokens", "0"], "give 1 or more"),
        (["--tokens", "66"], "--max-num-batched-tokens 65"),
        (["--cuda-graph-mode", "FULL"], "does not concern pieces"),
        (["--enforce-eager"], "does not concern pieces"),
    ],
)
def test_bad_flags(run_weft: RunWeft, tmp_path: Path, flags: list[str], message: str) -> None:
    result = run_weft("graph", "--dump", tmp_path / "new", *SMALL, *flags)
    assert result.status == 2 and message in result.err


def test_a_folder_that_cannot_be_made(run_weft: RunWeft, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = run_weft("graph", "--dump", tmp_path / "file" / "dump")
    assert result.status == 2 and "cannot be written" in result.err


def test_triton_kernels_are_noted_where_they_are_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    tl = pytest.importorskip("triton.language")
    from weft.ops.triton.launch import Kernel

    launched: list[tuple[Any, ...]] = []

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        launched.append((self, args, grid, warmup, kwargs))

    def scale_kernel(x, count, BLOCK: tl.constexpr): ...  # type: ignore

    monkeypatch.setattr(Kernel, "run", run)
    kernel, x = Kernel(scale_kernel), torch.ones(4)
    pool = OpRecordingPool(EmulatedGraphPool(), torch.device("cpu"), launches_noted)
    graph, _ = capture(pool, lambda: kernel[(2, 1)](x, 4, BLOCK=64))
    assert launched == [(kernel, (x, 4), (2, 1), False, {"BLOCK": 64})]
    assert isinstance(graph, GraphWithOps)
    (noted,) = graph.operations
    assert noted.code({}) == "scale_kernel[[2, 1]](v0, 4, BLOCK=64)" and noted.num_bytes() == 16
