"""Libraries that a start loads in threads, before torch is imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from weft.processes import preload

PROGRAM = """
import sys
from weft.processes.preload import create_cuda_context, import_torch, load_torch_libraries, use_gpu, wait
load_torch_libraries().join()
assert "torch" not in sys.modules
assert "libtorch_cpu" in open("/proc/self/maps").read()
import_torch()
assert sys.modules["torch"].ones(2).sum() == 2
import gc; assert gc.isenabled()
assert not use_gpu.cache_info().currsize, "nobody asked for the first GPU"
create_cuda_context()
import_torch()
assert use_gpu.cache_info().currsize
wait()
"""


def test_torch_is_imported_over_libraries_that_are_loaded() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)


def test_the_end_of_a_process_waits_for_what_was_begun() -> None:
    work = "lambda: (time.sleep(0.2), print('done'))"
    program = f"import time; from weft.processes.preload import _meanwhile; _meanwhile({work})"
    assert subprocess.run([sys.executable, "-c", program], check=True, capture_output=True).stdout == b"done\n"


def test_a_machine_without_torch_or_a_driver_has_nothing_to_load(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(preload, "find_spec", lambda name: None)
    preload._load_torch_libraries()
    preload._create_cuda_context()
    monkeypatch.undo()
    monkeypatch.setattr(preload, "_library_folder", lambda: tmp_path)
    preload._load_torch_libraries()
    monkeypatch.setattr(preload, "_has_cuda", lambda: True)

    def no_library(name: str, mode: int = 0) -> None:
        raise OSError(name)

    monkeypatch.setattr(preload.ctypes, "CDLL", no_library)
    preload._create_cuda_context()
    preload._use_gpu()


def test_a_gpu_that_fails_is_left_to_what_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def zeros(*size: int, device: str, dtype: torch.dtype) -> None:
        asked.append(device)
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(preload, "_has_cuda", lambda: True)
    monkeypatch.setattr(preload, "has_driver", lambda: True)
    monkeypatch.setattr(torch, "zeros", zeros)
    preload._use_gpu()
    assert asked == ["cuda"]


def test_whether_modules_are_compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    missing, found = str(tmp_path / "__init__.pyc"), []
    for torch_s, weft_s in ((missing, missing), (missing, __file__), (__file__, missing), (__file__, __file__)):
        cached = {"torch": torch_s, "weft": weft_s}
        monkeypatch.setattr(preload, "find_spec", lambda name, cached=cached: SimpleNamespace(cached=cached[name]))
        found.append(preload.has_bytecode())
    assert found == [False, False, False, True]


def test_the_first_start_alone_builds_tritons_part_in_c(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    built: list[str] = []
    for name, contents in (
        ("triton", {"knobs": SimpleNamespace(cache=SimpleNamespace(dir=str(tmp_path)))}),
        ("triton.backends.nvidia.driver", {"CudaUtils": lambda: built.append("built")}),
    ):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**contents))
    preload._build_triton_driver()
    assert built == ["built"]
    (tmp_path / "KEY").mkdir()
    (tmp_path / "KEY" / "cuda_utils.so").touch()
    preload._build_triton_driver()
    assert built == ["built"]
    monkeypatch.setitem(sys.modules, "triton.backends.nvidia.driver", None)  # another Triton
    preload._build_triton_driver()


def test_triton_is_imported_where_there_is_a_gpu_and_may_be_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a Triton that Weft does not know, kernels without Gluon run; without a driver none do."""
    monkeypatch.setattr(preload, "_has_cuda", lambda: True)
    monkeypatch.setitem(sys.modules, "triton.experimental", None)
    monkeypatch.setattr(preload, "look_up_triton_key", lambda: None)  # a later test has a key of its own
    asked: list[bool] = []
    for is_there in (True, False):
        monkeypatch.setattr(preload, "has_driver", lambda is_there=is_there: asked.append(is_there) or is_there)
        preload.import_torch()
    assert asked == [True, False]
