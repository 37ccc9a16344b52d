"""Settings that all tests share: tiers by hardware, few threads, and buffers that are poison until they are written.

A test without a tier marker is of the ``cpu`` tier. ``torch.empty`` and its kin hand out NaN in floating-point tensors,
so that a value read before it was written shows in every result it reaches.

Without a GPU, Triton's interpreter runs the kernels. Triton reads that choice when it is imported, so it is made here,
before any test module is. Ray reads then how its clusters authenticate. Inductor is told to trust what the
processor says of its vector instructions: finding out by compiling trial programs costs every process that compiles ten
seconds.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.whole import RUNS_LONG

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "a-token-that-only-these-tests-know-0123456789"}

gc.disable()  # until the tests are collected: two fifths of that time went into collections that freed nothing

TIERS = {"cpu": 0, "gpu": 1, "multi_gpu": 2}
"""GPUs that each tier needs."""
OF_GPUS = [Path(__file__).parent / name for name in ("gpu", "multi_gpu")]
LONG = [Path(__file__).parent / "clients" / name for name in ("test_langchain.py", "test_openai_agents.py")]
"""Modules of ``make test-all`` and ``make test-clients``. Every worker would spend ten seconds on their imports."""


def left_out() -> list[Path]:
    """Folders and modules that are not collected, except by their path. Without a GPU its tests would be skipped."""
    return OF_GPUS * (not torch.cuda.is_available()) + LONG * (not RUNS_LONG)


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    return True if collection_path in left_out() else None


def pytest_collection(session: pytest.Session) -> None:
    """Let every second worker import the modules of the whole suite from the end, so that two workers meet halfway.
    Each compiles and rewrites half of the modules that no run has compiled before, and reads the other half."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0")
    if int(worker.removeprefix("gw")) % 2 and session.config.args_source is pytest.Config.ArgsSource.TESTPATHS:
        root = Path(__file__).parent
        for path in sorted(root.rglob("test_*.py"), reverse=True):
            if not {path, *path.parents} & {*OF_GPUS, *left_out()}:
                name = ".".join(path.relative_to(root.parent).with_suffix("").parts)
                with contextlib.suppress(Exception, pytest.skip.Exception):  # the collection reports them
                    importlib.import_module(name)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    num_gpus = torch.cuda.device_count()
    for item in items:
        tiers = [name for name in TIERS if item.get_closest_marker(name)]
        if not tiers:
            item.add_marker("cpu")
        elif max(TIERS[name] for name in tiers) > num_gpus:
            item.add_marker(pytest.mark.skip(reason=f"needs {max(TIERS[name] for name in tiers)} GPU, has {num_gpus}"))


def pytest_collection_finish() -> None:
    """Exempt modules and collected tests from garbage collections. A rank collects when it closes, which takes half a
    second in a process with all tests of the suite. Every engine asks whether objects are frozen, and counting them
    takes a hundred times as long as the answer needs."""
    gc.enable()
    gc.set_threshold(10_000)  # the default of 700 takes a twentieth of the tests' time
    gc.collect()
    gc.freeze()
    gc.get_freeze_count = lambda: 1


def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest) -> None:
    """Refuse a fixture of a module that pytest makes for each test. It does so where one ``parametrize`` gives the
    fixture's parameter and other parameters."""
    assert request.scope == fixturedef.scope, f"{fixturedef.argname} is made anew for each test: see tests/shared.py"


count_frozen = gc.get_freeze_count
"""The count that Python has."""


@pytest.fixture(scope="session", autouse=True)
def _few_threads() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _own_cache_folder(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Iterator[None]:
    """Keep compiled code in one folder for one run of the suite. All processes of the run share the folder."""
    base = tmp_path_factory.getbasetemp()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WEFT_CACHE_DIR", str((base if worker_id == "master" else base.parent) / "weft-cache"))
        yield


@pytest.fixture(scope="session", autouse=True)
def _poisoned_empty() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in (
            (torch, "empty"),
            (torch, "empty_like"),
            (torch, "empty_strided"),
            (torch.Tensor, "new_empty"),
            (torch.Tensor, "new_empty_strided"),
        ):
            patch.setattr(owner, name, _poisoned(getattr(owner, name)))
        yield


def _poisoned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = make(*args, **kwargs)
        if tensor.is_floating_point() and not tensor.is_meta and not torch.compiler.is_compiling():
            with torch.no_grad():
                tensor.fill_(float("nan"))
        return tensor

    return poisoned
