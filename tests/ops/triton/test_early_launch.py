"""The rule of early launches, read off the kernels' source: every kernel waits before it touches what kernels write.

No run can prove the rule: a kernel that does not wait is wrong only when the previous kernel is late.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import weft.ops
from tests.ops.interpreter import DEVICE
from tests.ops.oracles import make_batch
from weft.layers import embedding
from weft.ops.attention import AttentionCall
from weft.ops.attention import decode as attention_decode
from weft.ops.moe import combine as moe_sum
from weft.ops.moe import experts as moe
from weft.ops.triton import early_launch
from weft.ops.triton.early_launch import Release
from weft.ops.triton.gluon import GLUON_IS_KNOWN

FOLDER = Path(weft.ops.__path__[0])
CAREFUL = {
    "_skinny_linear_kernel", "_fp8_few_rows_kernel", "_coded_linear_kernel",
    "_step_kernel", "_gdn_decode_kernel",
    "merge_kernel", "_rms_norm_kernel", "_qk_norm_rope_kernel", "_router_kernel",
    "_conv_update_kernel", "_scan_step_kernel", "_rg_lru_step_kernel", "_group_norm_kernel",
    "_verify_states_kernel", "_decode_states_kernel", "_gdn_verify_kernel", "_prefill_hopper_kernel",
    "_fp8_few_rows_hopper_kernel", "_fp8_pairs_hopper_kernel", "_sum_kernel", "_receive_norm_kernel", "_span_kernel",
    "_norm_streams_kernel", "_merge_parts_kernel",
    "_coded_few_rows_hopper_kernel", "_coded_pairs_hopper_kernel", "_fp8_experts_hopper_kernel",
}  # fmt: skip
"""Kernels that do something before they wait: make barriers, or load weights, metadata, or keys and states of earlier
steps."""
PASSES_ON = {
    "_gated_hopper_kernel": ("_produce", "linear/gated_hopper.py"),
    "_decode_kernel": ("decode_programs", "attention/merge.py"),
    "decode_hopper_kernel": ("decode_programs", "attention/merge.py"),
}
"""Kernels in which one function waits and the rest waits for that function, with the function's name and file."""
ORDINARY = {
    "_follow_kernel", "_accept_kernel", "_ahead_kernel", "_ngram_kernel", "_load_kernel", "_store_kernel",
    "_record_kernel", "_expand_kernel",
}  # fmt: skip
"""Kernels that are never launched early: each waits for all kernels before it. They write a step's metadata (as copies
and torch's kernels do), run between writers of metadata and early readers, or copy records on a separate stream."""


def kernels() -> Iterator[tuple[str, ast.FunctionDef]]:
    """Every kernel that the host may launch early, and the file it stands in."""
    for path in sorted(FOLDER.rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if not isinstance(node, ast.FunctionDef) or node.name in ORDINARY:
                continue
            if node.decorator_list and node.name.endswith("_kernel"):
                yield str(path.relative_to(FOLDER)), node


KERNELS = list(kernels())


def calls(node: ast.AST) -> list[str]:
    return [n.func.id for n in ast.walk(node) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)]


def test_there_are_kernels() -> None:
    assert len(KERNELS) > 20


@pytest.mark.parametrize(("file", "kernel"), KERNELS, ids=[kernel.name for _, kernel in KERNELS])
def test_a_kernel_waits_first(file: str, kernel: ast.FunctionDef) -> None:
    assert kernel.args.args[-1].arg == "EARLY", f"{file}: {kernel.name} cannot be launched early"
    body = [n for n in kernel.body if not (isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant))]
    if kernel.name in PASSES_ON:
        part, where = PASSES_ON[kernel.name]
        waiting = [n for n in ast.parse((FOLDER / where).read_text()).body if getattr(n, "name", None) == part]
        assert "release" in calls(kernel) and part in {n.id for n in ast.walk(kernel) if isinstance(n, ast.Name)}
        assert "wait" in calls(waiting[0])
    elif kernel.name in CAREFUL:
        assert {"release", "wait"} <= set(calls(kernel))
    else:
        assert "enter" in calls(body[0]), f"{file}: {kernel.name} begins with something else"


@cache
def launches() -> dict[str, list[ast.Call]]:
    """By name of the kernel, or of both that a variable may stand for."""
    found: dict[str, list[ast.Call]] = {}
    for path in FOLDER.rglob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        either = {
            ast.unparse(node.targets[0]): [
                ast.unparse(kernel).split(".")[-1] for kernel in (choice.body, choice.orelse)
            ]
            for node in nodes
            if isinstance(node, ast.Assign) and isinstance(choice := node.value, ast.IfExp)
        }
        for node in nodes:
            kernel = node.func.value if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript) else None
            if isinstance(kernel, ast.Name):
                for name in either.get(kernel.id, [kernel.id]):
                    found.setdefault(name, []).append(node)
    return found


@pytest.mark.parametrize("name", [kernel.name for _, kernel in KERNELS])
def test_every_launch_says_whether_it_is_early(name: str) -> None:
    assert name in launches(), f"{name} is launched nowhere"
    for launch in launches()[name]:
        assert "early_launch" in [name for k in launch.keywords if k.arg is None for name in calls(k.value)], name


def test_only_the_gpus_that_can_are_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    assert early_launch.early_launch(torch.device("cpu")) == {"EARLY": False}
    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(early_launch.knobs.runtime, "interpret", False)
    for capability, early in (((8, 9), False), ((9, 0), True), ((10, 0), True)):
        early_launch.early_launch.cache_clear()
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, c=capability: c)
        assert early_launch.early_launch(device).get("launch_pdl", False) is early
    early_launch.early_launch.cache_clear()


class Recorder:
    """A kernel that notes its launches."""

    def __init__(self, name: str, said: list[tuple[str, dict[str, Any]]]) -> None:
        self.name, self.said = name, said

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **options: self.said.append((self.name, options))


@pytest.mark.parametrize(
    ("early", "programs", "order"),
    [
        (False, 1, []),
        (Release.BY_KERNEL, 1056, ["release", "wait"]),
        (Release.BY_KERNEL, 1057, ["wait"]),
        (Release.AT_WAIT, 1, ["wait", "release"]),
        (Release.AT_END, 1, ["wait"]),
    ],
)
def test_a_launch_says_when_the_next_kernel_may_start(
    early: int, programs: int, order: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    monkeypatch.setattr(early_launch, "gdc_launch_dependents", lambda: done.append("release"))
    monkeypatch.setattr(early_launch, "gdc_wait", lambda: done.append("wait"))
    monkeypatch.setattr(early_launch.tl, "num_programs", lambda axis: programs if axis == 0 else 1)
    monkeypatch.setattr(early_launch, "_can_launch_early", lambda device: True)
    early_launch.early_launch.cache_clear()
    if early:
        device = torch.device("cuda", 0)
        assert early_launch.early_launch(device, Release(early)) == {"EARLY": int(early), "launch_pdl": True}
    early_launch.release.fn(int(early))
    early_launch.wait.fn(int(early))
    early_launch.early_launch.cache_clear()
    assert done == order


@pytest.mark.parametrize(
    ("early", "programs", "working", "released"),
    [
        (Release.BY_KERNEL, 1056, 1, False),  # has released before
        (Release.BY_KERNEL, 28 * 64, 16, True),
        (Release.BY_KERNEL, 28 * 64, 17, False),
        (Release.AT_END, 28 * 64, 1, False),
        (False, 28 * 64, 1, False),
    ],
)
def test_programs_without_work_do_not_count(
    early: int, programs: int, working: int, released: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[bool] = []
    monkeypatch.setattr(early_launch, "gdc_launch_dependents", lambda: done.append(True))
    monkeypatch.setattr(early_launch.tl, "num_programs", lambda axis: programs if axis == 0 else 1)
    early_launch.release_by_work.fn(int(early), working, 28)
    assert bool(done) == released


@pytest.mark.skipif(DEVICE == "cuda", reason="a compiled kernel calls no Python")
@pytest.mark.parametrize(("aim", "programs"), [(96, 16), (24, 4)])
def test_attention_says_how_many_programs_have_work(aim: int, programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence has one program with work per split, or all programs have work. The Gluon kernel counts alike."""
    said: set[tuple[int, int]] = set()

    def say(early: Any, working: Any, of: Any) -> None:
        said.add((int(working.handle.data[0]), int(of.handle.data[0])))

    monkeypatch.setattr(attention_decode, "release_by_work", say)
    batch = make_batch([1] * 3, [1500, 300, 20], num_decodes=3)
    cache, q = torch.zeros(int(batch.page_table.max()) + 1, 16, 2, 16), torch.zeros(3, 4, 16)
    tile = attention_decode.Tile(16, 64, warps=4, stages=2)
    choice = attention_decode.DecodeChoice(tile, split=128, aim=aim)
    attention_decode.launch_decode(AttentionCall(q, cache, cache, batch, 0.1, torch.empty_like(q)), choice)
    assert said == {(min(splits, programs), programs) for splits in (12, 3, 1)}
    calls_of = {}
    for file in ("attention/decode.py", "attention/decode_hopper.py"):
        found = [n for n in ast.walk(ast.parse((FOLDER / file).read_text())) if isinstance(n, ast.Call)]
        calls_of[file] = [ast.unparse(n) for n in found if ast.unparse(n.func) == "release_by_work"]
    triton, gluon = calls_of.values()
    assert len(triton) == 1 and [call.replace("gl.", "tl.") for call in gluon] == triton


@pytest.mark.parametrize(
    ("num_seqs", "table_tokens", "release"),
    [  # of Qwen3-0.6B
        (2, 2304, Release.BY_KERNEL),
        (4, 2304, Release.AT_WAIT),
        (4, 16384, Release.AT_WAIT),
        (4, 16400, Release.BY_KERNEL),  # no keys are held
        (8, 2304, Release.BY_KERNEL),
        (9, 2304, Release.AT_END),
        (32, 2304, Release.AT_END),
    ],
)
def test_what_follows_attention_starts_as_measured(num_seqs: int, table_tokens: int, release: Release) -> None:
    tile = attention_decode.decode_tile(num_seqs, 8, 128, 2, 2, 2, table_tokens)
    assert attention_decode.decode_release(num_seqs, 8, tile) == release


def test_launches_of_decode_steps_say_when_the_next_may_start(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[tuple[str, dict[str, Any]]] = []
    for module in (attention_decode, moe, moe_sum):
        monkeypatch.setattr(module, "early_launch", early_launch.early_launch.__wrapped__)
    monkeypatch.setattr(early_launch, "_can_launch_early", lambda device: True)
    for module, name in ((attention_decode, "_decode_kernel"), (attention_decode, "merge_kernel"),
                         (moe, "_up_kernel"), (moe, "_down_kernel"), (moe_sum, "_sum_kernel")):  # fmt: skip
        monkeypatch.setattr(module, name, Recorder(name, said))
    cache = torch.zeros(40, 16, 8, 128, dtype=torch.bfloat16)
    if GLUON_IS_KNOWN:
        monkeypatch.setattr(attention_decode.hopper, "decode_hopper_kernel", Recorder("_decode_kernel", said))
    on_hopper = [(8, GLUON_IS_KNOWN), (9, GLUON_IS_KNOWN)]
    for num_seqs, hopper in [(4, False), (8, False), (9, False), *on_hopper]:
        batch = make_batch([1] * num_seqs, [300] * num_seqs, num_decodes=num_seqs)
        tile = attention_decode.decode_tile(num_seqs, 8, 128, 2, 2, 2, batch.page_table.shape[1] * 16)
        q = torch.zeros(num_seqs, 16, 128, dtype=torch.bfloat16)
        choice = attention_decode.DecodeChoice(attention_decode.hopper.TILE if hopper else tile, hopper)
        attention_decode.launch_decode(AttentionCall(q, cache, cache, batch, 0.1, torch.empty_like(q)), choice)
    by_rows = [Release.AT_WAIT, Release.BY_KERNEL, Release.AT_END, Release.BY_KERNEL, Release.AT_END]
    wanted = [(release, Release.BY_KERNEL) for release in by_rows]
    assert [options["EARLY"] for _, options in said] == [each for both in wanted for each in both]
    for num_tokens, release in ((1, Release.AT_END), (2, Release.BY_KERNEL)):
        said.clear()
        x, ids = torch.zeros(num_tokens, 32), torch.zeros(num_tokens, 2, dtype=torch.int32)
        weights = torch.zeros(num_tokens, 2)
        moe.fused_moe_triton(x, torch.zeros(3, 32, 32), torch.zeros(3, 32, 16), weights, ids)
        assert [name for name, _ in said] == ["_up_kernel", "_down_kernel", "_sum_kernel"]
        assert [options["EARLY"] for _, options in said] == [Release.BY_KERNEL, Release.BY_KERNEL, release]


BEFORE_THE_WAIT = {
    "weight_rows", "table", "seq_lens", "cu_seqlens_q", "k_cache", "v_cache", "state_slots", "p_state",
    "weight", "words", "weight_scale", "p_angles", "positions", "slot_mapping", "k_scale", "bias", "A_log", "dt_bias",
    "D", "decay", "counts", "slots", "after_slots", "norm_weight", "rate", "skip", "addresses",
}  # fmt: skip
"""Arguments that the forward pass does not write, and the keys, values and states of earlier steps."""

EARLY_LOADS = (
    "_load_weight", "_load_parts", "load_keys_values", "_load_factors", "_scale", "first_pages",
    "_place", "sequence_of_block", "load_weights", "load_scales", "load_inputs", "areas_of", "packets_at",
    "request", "_words_at", "_scales_at",
)  # fmt: skip
"""Functions that load for kernels before they wait."""


LEAVES_EARLY = {
    "_gdn_decode_kernel", "_qk_norm_rope_kernel", "_conv_update_kernel", "_rg_lru_step_kernel",
    "_decode_states_kernel", "_gdn_verify_kernel", "_verify_states_kernel",
}  # fmt: skip
"""Kernels with a wait of their own for rows of padding, or for query heads, above that of the others."""

LOADERS = [
    "linear/skinny.py", "linear/fp8_few_rows.py", "linear/coded.py", "attention/decode.py", "attention/merge.py",
    "linear_attention/decode.py", "norm/kernels.py", "rotary/kernels.py", "convolution/decode.py", "mamba/scan.py",
    "rg_lru/scan.py", "attention/prefill_hopper.py", "linear/fp8_few_rows_hopper.py", "moe/fp8_pairs_hopper.py",
    "delta_rule/decode.py", "delta_rule/decode_gluon.py", "delta_rule/verify.py", "delta_rule/verify_gluon.py",
    "attention/decode_hopper.py", "moe/combine.py", "linear/coded_few_rows_hopper.py", "moe/coded_pairs_hopper.py",
    "triton/slot_rows.py",
]  # fmt: skip

PASSED_ON = {
    "moe/fp8_pairs_hopper.py": {"ids"},
    "moe/coded_pairs_hopper.py": {"ids"},
}
"""Arguments that kernels before the previous kernel wrote, by file. The previous kernel releases after its own wait."""


@pytest.mark.parametrize("file", LOADERS)
def test_only_what_was_there_is_read_before_the_wait(file: str) -> None:
    """Every load above a function's first wait, and all loads of the functions that it calls there."""
    body = ast.parse((FOLDER / file).read_text()).body
    functions = {node.name: node for node in body if isinstance(node, ast.FunctionDef)}
    for parts in ("attention/tiles.py", "linear/fp8_few_rows_hopper.py", "linear/coded_few_rows_hopper.py",
                  "collectives/packets.py"):  # fmt: skip
        shared = ast.parse((FOLDER / parts).read_text()).body
        functions = {node.name: node for node in shared if isinstance(node, ast.FunctionDef)} | functions

    def loaded(node: ast.AST, before: int) -> Iterator[str]:
        for call in ast.walk(node):
            if isinstance(call, ast.Call) and call.lineno < before:
                if ast.unparse(call.func) in ("tl.load", "gl.load", "_load_tiles", "load_inner"):
                    yield next(n.id for n in ast.walk(call.args[0]) if isinstance(n, ast.Name))
                elif isinstance(call.func, ast.Name) and call.func.id in EARLY_LOADS:
                    yield from loaded(functions[call.func.id], 10**9)

    waiting = [f for f in functions.values() if "wait" in calls(f)]
    assert waiting
    for function in waiting:
        if "MIXTURE" in [argument.arg for argument in function.args.args]:
            continue  # the kernel itself: it waits, or passes on to a function that does
        waits = [n for n in ast.walk(function) if isinstance(n, ast.Call) and ast.unparse(n.func) == "wait"]
        first = (max if function.name in LEAVES_EARLY else min)(n.lineno for n in waits)
        assert set(loaded(function, first)) <= BEFORE_THE_WAIT | PASSED_ON.get(file, set()), function.name


def test_what_was_passed_on_is_read_past_the_first_cache() -> None:
    for file, names in PASSED_ON.items():
        tree = ast.parse((FOLDER / file).read_text())
        assert "pass_on" in calls(tree)
        loads = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and ast.unparse(n.func) in ("tl.load", "gl.load")]
        of_names = [n for n in loads if names & {part.id for part in ast.walk(n) if isinstance(part, ast.Name)}]
        assert of_names and all("cache_modifier='.cg'" in ast.unparse(n) for n in of_names)


def test_a_receiver_starts_when_senders_have_waited_and_waits_last() -> None:
    """The receiver reads results of older kernels past the first cache, and reads packets again and again."""
    files = ("collectives/packets.py", "collectives/packed.py", "moe/combine.py", "linear/skinny.py")
    nodes = [node for file in files for node in ast.parse((FOLDER / file).read_text()).body]
    functions = {node.name: node for node in nodes if isinstance(node, ast.FunctionDef)}
    order = [name for name in calls(functions["_receive_norm_kernel"]) if name in (*functions, "release")]
    assert order == ["release", "flags_of", "_receive_and_norm"]
    both = "if not PASSED_ON:\n        wait(EARLY)", "if PASSED_ON:\n        wait(EARLY)\n    tl.store(counters"
    assert all(text in ast.unparse(functions["_receive_norm_kernel"]) for text in both)
    for name in ("flags_of", "_receive_and_norm", "_receive"):
        loads = [n for n in ast.walk(functions[name]) if isinstance(n, ast.Call) and ast.unparse(n.func) == "tl.load"]
        texts = [ast.unparse(load) for load in loads if "weight" not in ast.unparse(load)]
        assert texts and all("cache_modifier='.cg'" in text or "volatile=True" in text for text in texts)
    conditions = {
        "_sum_kernel": ("not PASSES_ON", "PASSES_ON"),
        "_skinny_linear_kernel": ("ROUTE is None", "ROUTE is not None"),
    }
    for name, (before, after) in conditions.items():
        found = ast.unparse(functions[name])
        early, late = f"if {before}:\n        release(EARLY)", f"if {after}:\n        release(EARLY)"
        assert 0 < found.index(early) < found.index("wait(EARLY)") < found.index(late) < found.index("flags_of(")
        assert found.count("release(EARLY)") == 2


def test_a_forward_pass_begins_with_an_ordinary_launch() -> None:
    """The embedding makes the step's metadata visible to kernels that read it before they wait."""
    assert (
        "weft.ops.triton" not in Path(embedding.__file__).read_text()
        and "F.embedding" in Path(embedding.__file__).read_text()
    )
