"""Launches that bypass Triton: the same kernel, launcher and arguments as Triton would have taken."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.backends.nvidia.driver import CudaLauncher
from triton.runtime import build
from triton.runtime.driver import driver
from triton.runtime.jit import create_function_from_signature

from weft.ops.norm import rms_norm, rms_norm_reference
from weft.ops.triton import launch as launch_module
from weft.ops.triton.launch import Kernel, each_its_own, jit, launches_handled

GRID, STREAM, FUNCTION, METADATA = (3, 2), 77, 1234, (4, 1, 0)


def scale(x, y, count, factor, BLOCK: tl.constexpr, EARLY: tl.constexpr):  # type: ignore[no-untyped-def]
    """A kernel that is never compiled here."""


class Gpu:
    """A stand-in for the driver, with the calls that a launch makes."""

    device = 0

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return STREAM + device


class Watched(Kernel):
    """Notes what Triton was asked to run, and what the C launcher got."""

    def __init__(self, **options: Any) -> None:
        super().__init__(scale, **options)
        self.by_triton: list[tuple[Any, ...]] = []
        self.direct: list[tuple[Any, ...]] = []
        launcher = CudaLauncher.__new__(CudaLauncher)
        launcher.launch = lambda *args: self.direct.append(args)
        launcher.launch_cooperative_grid, launcher.launch_pdl = False, True
        launcher.global_scratch_size = launcher.profile_scratch_size = 0
        launcher.global_scratch_align = launcher.profile_scratch_align = launcher.num_ctas = 1
        launcher.gsan_enabled, launcher.arg_annotations, launcher.kernel_signature = False, ["run-time"], b"types"
        self.compiled = SimpleNamespace(run=launcher, function=FUNCTION, packed_metadata=METADATA)

    def run(self, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        assert grid == GRID and not warmup
        self.by_triton.append((args, options))
        return self.compiled


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    gpu = Gpu()
    monkeypatch.setattr(driver, "_active", gpu)
    return gpu


def is_direct(kernel: Watched, *args: Any, **options: Any) -> bool:
    """Launch twice: was the first launch direct already? The second must be."""
    before = len(kernel.by_triton)
    kernel[GRID](*args, **options)
    was_known = len(kernel.by_triton) == before
    kernel[GRID](*args, **options)
    assert len(kernel.by_triton) == before + (not was_known)
    return was_known


X = torch.zeros(64)
OPTIONS = {"BLOCK": 64, "EARLY": True, "num_warps": 4}


def test_the_second_launch_calls_the_launcher_as_triton_does(gpu: Gpu) -> None:
    kernel, y = Watched(), torch.ones(64)
    kernel[GRID](X, y, 5, 0.5, **OPTIONS, launch_pdl=True)
    assert kernel.by_triton == [((X, y, 5, 0.5), OPTIONS | {"launch_pdl": True})] and not kernel.direct
    kernel[GRID](X, y, 7, 2.5, **OPTIONS, launch_pdl=True)
    assert len(kernel.by_triton) == 1
    kernel.compiled.run(3, 2, 1, STREAM, FUNCTION, METADATA, None, None, None, X, y, 7, 2.5, None, None)
    direct, of_triton = kernel.direct
    assert direct == of_triton and direct[:5] == (3, 2, 1, STREAM, FUNCTION)


@pytest.mark.parametrize(
    "args",
    [
        (X[1:], X, 5, 0.5), (X, X[1:], 5, 0.5), (X.half(), X, 5, 0.5), (X, X, 1, 0.5), (X, X, 16, 0.5),
        (X, X, 2**31, 0.5), (X, X, -(2**31) - 1, 0.5), (X, X, 5, 1), (X, X, True, 0.5), (X, None, 5, 0.5),
    ],
)  # fmt: skip
def test_what_triton_compiles_apart_is_kept_apart(gpu: Gpu, args: tuple[Any, ...]) -> None:
    kernel = Watched()
    assert not is_direct(kernel, X, X, 5, 0.5, **OPTIONS)
    assert not is_direct(kernel, *args, **OPTIONS)


@pytest.mark.parametrize("other", [{"BLOCK": 32}, {"EARLY": False}, {"num_warps": 8}, {"maxnreg": 64}])
def test_compile_time_arguments_and_options_are_kept_apart(gpu: Gpu, other: dict[str, Any]) -> None:
    kernel = Watched()
    assert not is_direct(kernel, X, X, 5, 0.5, **OPTIONS)
    assert not is_direct(kernel, X, X, 5, 0.5, **OPTIONS | other)


def test_values_that_are_not_specialised_share_a_launcher(gpu: Gpu) -> None:
    kernel = Watched(do_not_specialize=["count"], do_not_specialize_on_alignment=["y"])
    assert not is_direct(kernel, X, X, 5, 0.5, **OPTIONS)
    assert all(is_direct(kernel, X, X[1:], count, 0.25, **OPTIONS) for count in (0, 1, 16, 17))
    assert not is_direct(kernel, X, X[1:], 2**40, 0.25, **OPTIONS)


def test_every_device_has_launchers_of_its_own(gpu: Gpu) -> None:
    kernel = Watched()
    assert not is_direct(kernel, X, X, 5, 0.5, **OPTIONS)
    gpu.device = 1
    assert not is_direct(kernel, X, X, 5, 0.5, **OPTIONS)
    assert [args[3] for args in kernel.direct] == [STREAM, STREAM + 1]


def test_keys_differ_where_those_of_triton_differ() -> None:
    kernel = Kernel(scale, do_not_specialize=["count"], do_not_specialize_on_alignment=["y"])
    backend = CUDABackend(GPUTarget("cuda", 90, 32))
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    values = ([X, X[1:], X.half(), None], [X, X[1:], X.long()], [1, 5, 16, 2**40, True], [0.5, 1, 16, 3])
    pairs = {}
    for args in itertools.product(*values):
        for options in (OPTIONS, OPTIONS | {"num_warps": 8}):
            _, specialization, rest = bind(*args, **options)
            own = (tuple(specialization), str(rest))
            assert pairs.setdefault(kernel.key(args, options), own) == own
    assert len(pairs) == len(set(pairs.values())) > 100


@pytest.fixture
def hook() -> Iterator[Any]:
    def hook(metadata: Any) -> None: ...

    yield hook
    knobs.runtime.launch_enter_hook.remove(hook)
    knobs.runtime.launch_exit_hook.remove(hook)


@pytest.mark.parametrize("chain", ["launch_enter_hook", "launch_exit_hook"])
def test_hooks_see_every_launch(gpu: Gpu, hook: Any, chain: str) -> None:
    kernel = Watched()
    assert not is_direct(kernel, X, X, 5, 0.5, **OPTIONS)
    getattr(knobs.runtime, chain).add(hook)
    kernel[GRID](X, X, 5, 0.5, **OPTIONS)
    assert len(kernel.by_triton) == 2 and len(kernel.direct) == 1


@pytest.mark.parametrize("missing", ["scratch", "version"])
def test_what_the_launcher_needs_more_for_stays_with_triton(
    gpu: Gpu, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = Watched()
    if missing == "scratch":
        kernel.compiled.run.global_scratch_size = 128
    else:
        monkeypatch.setattr(launch_module, "_IS_KNOWN", False)
    for _ in range(3):
        kernel[GRID](X, X, 5, 0.5, **OPTIONS)
    assert len(kernel.by_triton) == 3 and not kernel.direct


def test_launches_can_be_handled_by_another(gpu: Gpu) -> None:
    kernel, handled = Watched(), []
    assert not is_direct(kernel, X, X, 5, 0.5, **OPTIONS)
    with launches_handled(lambda *launch: handled.append(launch)):
        kernel[GRID](X, X, 5, 0.5, **OPTIONS)
    assert handled == [(kernel, GRID, (X, X, 5, 0.5), OPTIONS)] and len(kernel.direct) == 1
    assert is_direct(kernel, X, X, 5, 0.5, **OPTIONS)


def test_kernels_keep_the_order_of_arguments() -> None:
    def late(BLOCK: tl.constexpr, x): ...  # type: ignore[no-untyped-def]

    with pytest.raises(AssertionError, match="come first"):
        Kernel(late)
    with pytest.raises(AssertionError, match="by name"):
        Kernel(scale).key((X, X, 5, 0.5, 64), {"EARLY": True})


def test_interpreted_kernels_are_those_of_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(knobs.runtime, "interpret", True)
    assert not isinstance(jit(scale), Kernel) and not isinstance(jit(do_not_specialize=["count"])(scale), Kernel)
    monkeypatch.setattr(knobs.runtime, "interpret", False)
    assert isinstance(jit(scale), Kernel) and isinstance(jit(do_not_specialize=["count"])(scale), Kernel)


@pytest.mark.gpu
def test_rows_at_any_alignment_on_the_gpu() -> None:
    """Again and again, in turns: no launch takes the kernel of other rows."""
    from weft.ops.backend import Backend

    buffer = torch.randn(5 * 130 + 8, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(130, device="cuda", dtype=torch.bfloat16)
    for _, offset, rows in itertools.product(range(3), (0, 1, 8, 3), (1, 5)):
        x = buffer[offset : offset + rows * 130].view(rows, 130)
        torch.testing.assert_close(
            rms_norm(x, weight, 1e-6, backend=Backend.TRITON), rms_norm_reference(x, weight, 1e-6), rtol=1e-2, atol=1e-2
        )


MODULE = """
#include <Python.h>
static PyObject* launch(PyObject* self, PyObject* args) { return PyLong_FromLong(NUMBER); }
static PyMethodDef methods[] = {{"launch", launch, METH_VARARGS, ""}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "__triton_launcher", NULL, -1, methods};
PyMODINIT_FUNC PyInit___triton_launcher(void) { return PyModule_Create(&definition); }
"""


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs a C compiler")
def test_a_launcher_that_is_loaded_again_stays_what_it_was(tmp_path: Path) -> None:
    """CPython loads a file again by overwriting the last module of the same name, here a different launcher."""
    load = build._load_module_from_path
    if launch_module._TAKES_TUPLE:
        load = each_its_own(load)
    paths = []
    for number in range(3):
        source = tmp_path / f"{number}.c"
        source.write_text(MODULE.replace("NUMBER", str(number)))
        library = build._build("__triton_launcher", str(source), str(tmp_path), [], [], [], [])
        paths.append(Path(library).rename(tmp_path / f"{number}.so"))
    first = [load("__triton_launcher", str(path)) for path in paths]
    again = [load("__triton_launcher", str(path)) for path in paths]
    assert [module.launch() for module in (*first, *again)] == [0, 1, 2, 0, 1, 2]
