"""Kernels that are missing in Triton's cache are compiled in other processes. The rest is read from the cache."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any, cast

import pytest
import triton

import weft.ops
from tests.whole import takes_long
from weft.errors import ConfigError
from weft.runner import compile_order, compile_processes
from weft.runner.compile_processes import kernel_lock, wait_for_lock


@takes_long
def test_two_first_starts_compile_every_kernel_once_and_a_later_start_none(tmp_path: Path) -> None:
    """The starting processes compile nothing and only find results. The listener is told in the process that compiles.
    Files that the compiler made on the way are not kept. The folder may be shipped: copied to the same path again. The
    later start has one more kernel, in which the compiler finds an error."""
    here, shipped = tmp_path / "kernels", tmp_path / "shipped"
    with ThreadPoolExecutor(2) as threads:
        runs = list(threads.map(lambda _: _run(here, ""), range(2)))
    assert len((here / "compiled").read_text().splitlines()) == 4 and not list(here.glob("**/*.ptx"))
    here.rename(shipped)
    shutil.copytree(shipped, here, copy_function=shutil.copyfile)
    runs.append(_run(here, "broken"))
    assert runs[-1]["given_away"] == 1 and runs[-1]["error"] == "CompilationError"
    assert all(run["compiled_here"] == 0 and run["kernels"] == 4 and run["left"] == 0 for run in runs)


def test_a_kernel_is_locked_while_another_process_compiles_it_and_no_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    kernel, other = SimpleNamespace(hash=lambda: "a"), SimpleNamespace(hash=lambda: "b")
    holds, ends = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=_hold, args=(kernel, ends))
    process.start()
    assert holds.recv() is True
    with kernel_lock(kernel, {}) as is_mine, kernel_lock(kernel, {"num_warps": 8}) as is_mine_too:
        assert (is_mine, is_mine_too) == (False, True)
    with kernel_lock(other, {}) as is_mine:
        assert is_mine
    assert not wait_for_lock(kernel, {}, limit_s=0.0), "it hangs: who waits goes on alone"
    assert f"process {process.pid} has been compiling" in caplog.text
    waits = Thread(target=wait_for_lock, args=(kernel, {}), daemon=True)
    waits.start()
    assert waits.is_alive()
    process.kill()
    waits.join(60)
    with kernel_lock(kernel, {}) as is_mine:
        assert is_mine and not waits.is_alive()


def _hold(kernel: Any, ends: Any) -> None:
    with kernel_lock(kernel, {}) as is_mine:
        ends.send(is_mine)
        ends.recv()


def test_where_no_file_can_be_locked_every_process_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel: Any = SimpleNamespace(hash=lambda: "a")
    (tmp_path / "no folder").write_text("")
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path / "no folder"))
    with kernel_lock(kernel, {}) as is_mine:
        assert is_mine
    assert compile_processes._place(kernel, {}) != compile_processes._place(kernel, {"num_warps": 8})


def test_compilers_leave_interrupts_to_their_parent_and_keep_binaries_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_processes, "die_with_parent", lambda pid: None)
    monkeypatch.setattr(triton.knobs.compilation, "store_binary_only", False)
    handler = signal.getsignal(signal.SIGINT)
    try:
        compile_processes._begin_child(1)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN and triton.knobs.compilation.store_binary_only
    finally:
        signal.signal(signal.SIGINT, handler)


def test_where_every_lock_is_refused_this_process_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A refused lock looks like a lock held by another process. A waiter then finds that no process holds the lock."""

    def refuse(*args: Any) -> None:
        raise PermissionError

    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    monkeypatch.setattr(compile_processes.fcntl, "lockf", refuse)
    missing = compile_processes._MissingError()
    missing.src, missing.options = SimpleNamespace(hash=lambda: "a"), {}
    with compile_processes.CompileProcesses(1, lambda kernel: None) as processes:
        monkeypatch.setattr(processes, "_compile_in_child", lambda *missing: pytest.fail("again"))
        kernel: Any = SimpleNamespace(src=SimpleNamespace(signature={}))
        assert processes._when_compiled(False, missing, lambda: kernel) is kernel


def test_the_slowest_kernel_that_waits_is_compiled_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Among equally slow kernels, the first is compiled first. A compilation in progress continues. Later kernels find
    the launcher of the first kernel with the same signature."""
    begins, first_loads = Event(), Event()
    begun: list[str] = []
    loaded: list[str] = []

    def compiled(self: Any, src: Any, options: Any) -> bool:
        begun.append(src.name)
        begins.wait(60)
        return True

    def load(kernel: Any) -> None:
        if kernel.name == "other":
            first_loads.wait(60)
        loaded.append(kernel.name)
        if kernel.name == "different":
            first_loads.set()

    def missed(name: str, kind: str, signature: str) -> Callable[[], Any]:
        missing = compile_processes._MissingError()
        missing.src = SimpleNamespace(fn=SimpleNamespace(__name__=kind), name=name, signature=signature)
        missing.options, misses = {}, [missing]

        def compile_function() -> Any:
            if misses:
                raise misses.pop()
            return SimpleNamespace(name=name, src=missing.src)

        return compile_function

    monkeypatch.setattr(compile_processes.CompileProcesses, "_processes", lambda self: None)
    monkeypatch.setattr(compile_processes.CompileProcesses, "_compile_in_child", compiled)
    monkeypatch.setattr(compile_processes, "compile_seconds", {"slow": 2.0, "slower": 3.0, "fast": 0.0}.__getitem__)
    kernels = [
        ("other", "fast", "i32"), ("same", "fast", "i32"), ("slow", "slow", "i32"), ("slower", "slower", "i32"),
        ("different", "slow", "i64"),
    ]  # fmt: skip
    with compile_processes.CompileProcesses(1, load) as processes:
        futures = [processes.submit(missed(*kernels[0]))]
        while not begun:
            time.sleep(0.001)
        futures += [processes.submit(missed(*kernel)) for kernel in kernels[1:]]
        begins.set()
        assert [future.result(60).name for future in futures] == [name for name, *_ in kernels]
    assert begun == ["other", "slower", "slow", "different", "same"]
    assert loaded[:2] == ["different", "other"] and set(loaded[2:]) == {"slower", "slow", "same"}


def test_every_kernel_with_a_place_in_the_order_is_there() -> None:
    source = "".join(path.read_text() for path in Path(weft.ops.__path__[0]).rglob("*.py"))
    assert all(f"def {name}(" in source for name in compile_order._SECONDS)
    assert compile_order.compile_seconds("_prefill_hopper_kernel") > compile_order.compile_seconds("unknown") == 0.0


def test_a_compiler_that_ends_by_a_timeout_of_its_own_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has answered, and is not taken for a process that does not; this process compiles."""
    ended: Future[bool] = Future()
    ended.set_exception(TimeoutError())
    monkeypatch.setattr(compile_processes, "STUCK_S", 0.0)
    with compile_processes.CompileProcesses(1, lambda kernel: None) as processes:
        monkeypatch.setattr(processes, "_kill", pytest.fail)
        with pytest.raises(TimeoutError):
            processes._wait(ended)


def test_processes_are_not_given_up_while_others_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each thread waits for a kernel of its own. An answer to another thread shows that the processes work."""
    now, killed = [0.0], []
    monkeypatch.setattr(compile_processes, "STUCK_S", 10.0)
    monkeypatch.setattr(compile_processes, "time", SimpleNamespace(monotonic=lambda: now[0]))
    with compile_processes.CompileProcesses(1, lambda kernel: None) as processes:
        monkeypatch.setattr(processes, "_kill", lambda: killed.append(now[0]))

        def result(timeout_s: float) -> bool:
            now[0] += timeout_s
            if now[0] == 20.0:
                assert processes._wait(answers)  # in another thread
            if now[0] == 50.0:
                return True
            raise TimeoutError

        answers = SimpleNamespace(result=lambda timeout_s: True)
        processes._answered = 5.0
        assert processes._wait(SimpleNamespace(result=result, done=lambda: False))  # type: ignore[arg-type]
        assert killed == [30.0, 40.0] and processes._answered == 50.0


@takes_long  # their threads are above
def test_processes_that_do_not_answer_are_given_up(tmp_path: Path) -> None:
    run = _run(tmp_path, "asleep")
    assert (run["given_away"], run["compiled_here"], run["left"]) == (4, 4, 0)
    assert "given up" in run["said"]


def test_what_may_be_gone_later_is_no_fault_of_the_cache() -> None:
    with pytest.raises(BlockingIOError), compile_processes._cache_in_use():
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever compiles or loads, in the thread that submits or another."""

    def refuse(*args: Any, **options: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    monkeypatch.setattr(triton, "compile", refuse)
    said = f"No space left on device; kernels are kept in {tmp_path}"
    with compile_processes.CompileProcesses(1, refuse) as processes:
        source, kernel = SimpleNamespace(), cast("Any", SimpleNamespace(src=SimpleNamespace(signature={})))
        for attempt in (
            lambda: processes.compile(source),
            processes._threads.submit(processes.compile, source).result,
            lambda: processes._loaded(kernel),
        ):
            with pytest.raises(ConfigError, match=re.escape(said)):
                attempt()


def _run(folder: Path, what: str) -> dict[str, Any]:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.runner.compile_twice", what]
    done = subprocess.run(
        command, env=environment | {"TRITON_CACHE_DIR": str(folder)}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]) | {"said": done.stderr}
