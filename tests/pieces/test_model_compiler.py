# ruff: noqa: F811 (fixtures of another module)
"""Traced and compiled forms in the engine: real models cut as they should be, same answers, nothing compiled twice."""

from __future__ import annotations

import dataclasses
import operator
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.harness import model_context
from tests.pieces.fake_model import context_of
from tests.pieces.test_piecewise import ARCHS, SETTINGS, TOKENS, answers, churn  # noqa: F401
from tests.tiny import make_checkpoint
from tests.whole import takes_long, unless_long
from weft.config import resolve
from weft.config.checkpoint import read_checkpoint_config
from weft.errors import ConfigError
from weft.layers import moe
from weft.models.registry import create_model
from weft.ops.backend import Backend
from weft.ops.traced import opaque_ops
from weft.pieces.inductor import code_of
from weft.pieces.named_splits import _is_same
from weft.pieces.sources import CompileCounters, SplitPass, Traced, run_eagerly
from weft.pieces.tracing import NUM_TOKENS, TOKEN_IDS, trace
from weft.runner.model_runner import ModelRunner
from weft.runner.step_functions import StepFunctions

TRACED: dict[str, Any] = {"cuda_graph_mode": "PIECEWISE", "piecewise_cuda_graph_compiler": "eager"}
COMPILED: dict[str, Any] = {
    "cuda_graph_mode": "FULL_AND_PIECEWISE",
    "cuda_graph_bs": [1, 2, 4],
    "piecewise_cuda_graph_tokens": [16, 64, 210],
    "piecewise_cuda_graph_compiler": "inductor",
    "enable_torch_compile": True,
    "torch_compile_max_bs": 2,
}


@pytest.fixture(scope="module", params=unless_long(ARCHS[:1], ARCHS))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def runner(checkpoint: Path) -> ModelRunner:
    return ModelRunner(resolve(model=str(checkpoint), **SETTINGS, **TRACED, piecewise_cuda_graph_tokens=[4, 64]))


def traced_pass(runner: ModelRunner) -> SplitPass:
    (model,) = runner.compiler._prepared.values()
    assert isinstance(model, SplitPass)
    return model


@takes_long
def test_a_real_model_is_cut_at_its_layers(runner: ModelRunner) -> None:
    items = traced_pass(runner).items
    assert [item.layer for item in items if item.op is not None] == list(runner._layers)
    assert all((a.op is None) != (b.op is None) for a, b in pairwise(items))
    assert items[0].op is None and items[-1].op is None


def test_results_are_picked_where_they_are_computed(runner: ModelRunner) -> None:
    picked = 0
    for item in traced_pass(runner).items:
        for node in item.graph.graph.find_nodes(op="call_function", target=operator.getitem):
            assert node.args[0].op != "placeholder" or isinstance(node.args[0].meta["example_value"], Tensor)
            picked += 1
    assert picked >= 4 * len(runner._layers)  # two results of each norm


def test_what_is_bound_never_moves(runner: ModelRunner) -> None:
    """Parameters, and the one static field of a batch; everything else comes with the call."""
    static = {p.data_ptr() for p in runner.model.parameters()}
    token_count = runner.steps.builder.materialise(runner.steps.functions.mixed_shape(4)).batch.token_count
    assert token_count is not None
    static.add(token_count.data_ptr())
    inputs = traced_pass(runner)._inputs
    assert {i for i in inputs if isinstance(i, str)} == {NUM_TOKENS, TOKEN_IDS}
    assert {i.data_ptr() for i in inputs if isinstance(i, Tensor)} <= static


def test_layers_that_are_built_alike_have_the_same_code(tmp_path: Path) -> None:
    folder = make_checkpoint("Qwen3ForCausalLM", tmp_path, num_hidden_layers=5)
    runner = ModelRunner(resolve(model=str(folder), **SETTINGS, **TRACED, piecewise_cuda_graph_tokens=[4]))
    codes = [code_of(item.graph) for item in traced_pass(runner).items if item.op is None]
    assert len(codes) == 6 and len(set(codes)) == 3 and len(set(codes[1:-1])) == 1


@takes_long  # tests/test_x_matrix.py has traced pieces
@pytest.mark.parametrize("splitting_ops", [None, ["+gated_delta_net"]])
def test_traced_pieces_do_not_change_the_answers(
    checkpoint: Path,
    splitting_ops: list[str] | None,
    churn: list[int],
) -> None:
    expected, _ = answers(checkpoint)
    given, runner = answers(checkpoint, **TRACED, piecewise_cuda_graph_tokens=TOKENS, splitting_ops=splitting_ops)
    assert given == expected and len(set(churn)) >= 5
    layers = runner.config.model_config.layer_types
    breaks = layers.count("full_attention") if splitting_ops is None else len(layers)
    assert runner.graphs.pieces is not None and len(runner.graphs.pieces._source._plan) + 1 == breaks + 1
    assert runner.compiler.counters == CompileCounters()


@pytest.fixture
def compiled_sizes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """Sizes of captured decode steps, and whether they ran the compiled form."""
    sizes: list[tuple[int, bool]] = []
    decode: Callable[[StepFunctions, int], Any] = StepFunctions.decode
    call = SplitPass.__call__

    def noted_call(self: SplitPass, input_ids: Tensor) -> Tensor:
        sizes[-1:] = [(size, True) for size, _ in sizes[-1:]]
        return call(self, input_ids)

    def noted(self: StepFunctions, size: int) -> Any:
        sizes.append((size, False))
        return decode(self, size)

    monkeypatch.setattr(SplitPass, "__call__", noted_call)
    monkeypatch.setattr(StepFunctions, "decode", noted)
    return sizes


@takes_long
def test_compiled_forms_do_not_change_the_answers_and_are_kept(
    tmp_path: Path,
    churn: list[int],
    compiled_sizes: list[tuple[int, bool]],
) -> None:
    """Pieces and decode graphs share what is compiled: five pieces, two of which are alike."""
    folder = make_checkpoint("Qwen3NextForCausalLM", tmp_path)
    expected, _ = answers(folder)
    given, runner = answers(folder, **COMPILED)
    assert given == expected and len(set(churn)) >= 2
    graphs = runner.graphs
    assert graphs.pieces is not None and graphs.decode is not None and graphs.decode.counters.replays > 3
    assert set(compiled_sizes[: 3 * len(COMPILED["cuda_graph_bs"])]) == {(4, False), (2, True), (1, True)}
    assert runner.compiler.counters.reused == 1
    again, second = answers(folder, **COMPILED)
    assert again == expected and second.graphs.pieces is not None
    assert (second.compiler.counters.compiled, second.compiler.counters.cache_hits) == (0, 4)


@takes_long
def test_decode_graphs_alone_can_be_compiled(tmp_path: Path, compiled_sizes: list[tuple[int, bool]]) -> None:
    folder = make_checkpoint("Qwen3NextForCausalLM", tmp_path)
    expected, _ = answers(folder)
    settings = {"cuda_graph_mode": "FULL_DECODE_ONLY", "cuda_graph_bs": [4], "enable_torch_compile": True}
    given, runner = answers(folder, **settings)
    assert given == expected and runner.graphs.pieces is None
    assert set(compiled_sizes) == {(4, True)} and runner.compiler.counters.reused == 1


NAMED = {
    "modules": (["attention", "model.layers.*.mlp"], lambda layers: len(layers) + layers.count("full_attention")),
    "class": (["SparseMoe"], len),
    "method": (["GatedDeltaNet.mix", "attention"], len),
    "function": (
        ["+weft.quantization.unquantized.fused_moe"],
        lambda layers: len(layers) + layers.count("full_attention"),
    ),
    "attention inside": (["gated_delta_net"], lambda layers: layers.count("linear_attention")),
}
"""Names to split at, and the breaks that they make of the layers' types. All layers of the checkpoint have experts."""


@pytest.mark.parametrize(
    ("what", "source"),
    unless_long([("modules", "capture")], product(NAMED, ["capture", "eager"])),
)
def test_functions_methods_and_modules_are_split_off_by_name(
    tmp_path: Path, what: str, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The arguments found for a call are used for all sizes, also where few rows are computed in another way."""
    monkeypatch.setattr(moe, "most_routed_rows", lambda experts: TOKENS[1])
    folder = make_checkpoint("Qwen3NextForCausalLM", tmp_path)
    expected, _ = answers(folder)
    names, breaks = NAMED[what]
    settings = {"cuda_graph_mode": "PIECEWISE", "piecewise_cuda_graph_compiler": source}
    given, runner = answers(folder, **settings, piecewise_cuda_graph_tokens=TOKENS, splitting_ops=names)
    assert given == expected
    pieces = runner.graphs.pieces
    assert pieces is not None and pieces.counters.replays > 3
    assert len(pieces._source._plan) + 1 == breaks(list(runner.config.model_config.layer_types)) + 1


@takes_long
def test_pieces_are_split_at_names_beside_compiled_decodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces and decodes come from one source. A decode is one graph, and its trace has no breaks at names."""
    source = Traced(torch.device("cpu"), run_eagerly, opaque_ops(fusible=True))
    monkeypatch.setattr("weft.pieces.model_compiler.make_source", lambda name, device: source)
    folder = make_checkpoint("Qwen3NextForCausalLM", tmp_path)
    expected, _ = answers(folder)
    names, breaks = NAMED["modules"]
    given, runner = answers(folder, **COMPILED, splitting_ops=names)
    assert given == expected and runner.graphs.pieces is not None
    assert len(runner.graphs.pieces._source._plan) == breaks(list(runner.config.model_config.layer_types))


@pytest.mark.parametrize(
    ("source", "most_rows"), [("capture", TOKENS[1]), pytest.param("eager", 1 << 20, marks=takes_long)]
)
def test_a_call_that_is_given_something_else_for_few_rows_is_refused(
    tmp_path: Path, source: str, most_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arguments found for one number of rows would be used for all. Here they include the shared expert or not."""
    monkeypatch.setattr(moe, "most_routed_rows", lambda experts: most_rows)
    monkeypatch.setattr(moe, "serves_any_num_tokens", torch.compiler.is_dynamo_compiling)
    folder = make_checkpoint("Qwen3NextForCausalLM", tmp_path)
    settings = {"cuda_graph_mode": "PIECEWISE", "piecewise_cuda_graph_compiler": source}
    settings |= {"piecewise_cuda_graph_tokens": TOKENS, "splitting_ops": NAMED["function"][0]}
    with pytest.raises(ConfigError, match=r"fused_moe is not given the same for every number of tokens: argument"):
        ModelRunner(resolve(model=str(folder), **SETTINGS, **settings))


def test_batches_are_told_apart_by_their_tensors() -> None:
    """A function that is given the batch must not be split off: another step's has the same sizes and other memory."""
    found, later = (context_of([2, 3], {}).batch for _ in range(2))
    chunks = {"chunks": {64: found.cu_seqlens_q}}
    assert not _is_same(later, found) and not _is_same(later, dataclasses.replace(later, positions=found.positions))
    assert _is_same(dataclasses.replace(found, **chunks), dataclasses.replace(found, **chunks))
    assert not _is_same(found, dataclasses.replace(found, **chunks))


def test_names_are_wrapped_during_the_capture_alone(tmp_path: Path) -> None:
    from weft.layers import moe
    from weft.ops.moe import fused_moe

    folder = make_checkpoint("Qwen3NextForCausalLM", tmp_path)
    names = ["weft.ops.moe.fused_moe", "SparseMoe", "attention"]
    settings = {"cuda_graph_mode": "PIECEWISE", "piecewise_cuda_graph_tokens": [16], "splitting_ops": names}
    before = {key: value for key, value in vars(moe).items() if callable(value)}
    with pytest.raises(ConfigError, match=r"fused_moe', which no forward pass"):  # it is in SparseMoe
        ModelRunner(resolve(model=str(folder), **SETTINGS, **settings))
    runner = ModelRunner(resolve(model=str(folder), **SETTINGS, **(settings | {"splitting_ops": names[1:]})))
    assert {key: value for key, value in vars(moe).items() if callable(value)} == before
    assert not hasattr(fused_moe, "sites")
    assert not any("forward" in vars(module) for module in runner.model.modules())


@pytest.mark.parametrize(
    ("splitting_ops", "message"),
    [
        (["attention", "gdn"], "splitting_ops names 'gdn', which is no split op; there are .*gated_delta_net"),
        (["Mpl"], "'Mpl', which is no split op, no function .*its classes are .*MLP.*, its modules for example model"),
        (["model.layers.9.mlp"], "'model.layers.9.mlp', which is no split op"),
        (["weft.ops.norm.no_such"], "'weft.ops.norm.no_such', which is no split op"),
        (["DecoderLayer"], "DecoderLayer.*layers.0.forward returns a tuple; a split op returns one tensor"),
        (["weft.ops.sampling.exponential_noise"], "exponential_noise', which no forward pass of the model calls"),
        (["weft.ops.activation.silu_and_mul"], "silu_and_mul', which no forward pass"),  # only its reference is called
    ],
)
def test_split_ops_that_cannot_be_are_refused(tmp_path: Path, splitting_ops: list[str], message: str) -> None:
    folder = make_checkpoint("Qwen3ForCausalLM", tmp_path)
    with pytest.raises(ConfigError, match=message):
        ModelRunner(resolve(model=str(folder), **SETTINGS, **TRACED, splitting_ops=splitting_ops))


IN_A_FRESH_PROCESS = """
import sys
from weft.config import resolve
from weft.runner.model_runner import ModelRunner
runner = ModelRunner(resolve(model=sys.argv[1], max_num_seqs=1, max_model_len=16, cuda_graph_mode="PIECEWISE",
                             piecewise_cuda_graph_tokens=[4], splitting_ops=["+gated_delta_net"]))
assert len(runner.graphs.pieces._source._plan) + 1 == len(runner.config.model_config.layer_types) + 1
"""


@takes_long
def test_split_ops_of_layers_that_the_model_lacks_are_known(tmp_path: Path) -> None:
    """In every process: whether a name is known must not depend on which models were loaded before."""
    folder = make_checkpoint("Qwen3ForCausalLM", tmp_path)
    done = subprocess.run([sys.executable, "-c", IN_A_FRESH_PROCESS, str(folder)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@takes_long
def test_models_of_different_widths_are_traced_in_one_process(tmp_path: Path) -> None:
    """Dynamo takes for a variable what differs from one trace to the next."""
    for hidden_size in unless_long((64, 48), (64, 48, 80)):
        folder = make_checkpoint("Qwen3ForCausalLM", tmp_path / str(hidden_size), hidden_size=hidden_size)
        context = model_context(backend=Backend.TRITON)
        model = create_model(read_checkpoint_config(folder), context).eval()
        with torch.inference_mode():
            trace(model, context_of([5], context.layers), torch.device("cpu"), 64, opaque_ops(fusible=True))


@pytest.mark.parametrize(
    ("arch", "fusible"),
    unless_long(
        [("Qwen3ForCausalLM", False)], product(["Qwen3NextForCausalLM", "Qwen3ForCausalLM"], [True, False])
    ),
)
def test_the_kernels_path_is_traced_without_looking_into_kernels(tmp_path: Path, arch: str, fusible: bool) -> None:
    """On the CPU: nothing of a traced pass runs, so the kernels need not be there."""
    context = model_context(backend=Backend.TRITON)
    model = create_model(read_checkpoint_config(make_checkpoint(arch, tmp_path)), context).eval()
    plain = context_of([5], context.layers)
    batch = dataclasses.replace(plain.batch, token_count=torch.zeros(1, dtype=torch.int32))
    with torch.inference_mode():
        operations = opaque_ops(fusible=fusible)
        graph = trace(model, dataclasses.replace(plain, batch=batch), torch.device("cpu"), 64, operations).graph
    called = {str(node.target).removesuffix(".default") for node in graph.graph.nodes if node.op == "call_function"}
    ours = {name.removeprefix("weft.") for name in called if name.startswith("weft.")}
    split = {"attention_with_output"} | ({"gated_delta_net_with_output"} if "Next" in arch else set())
    assert split <= ours and ours - split <= operations
    assert ("rms_norm" in ours) == fusible and ("fused_moe" in ours) == ("Next" in arch)
    assert not any("triton" in name for name in called)
