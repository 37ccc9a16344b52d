"""Compiling Triton kernels in several processes.

Job: have kernels compiled that are not in Triton's cache, and put all of them on the device. Owns: the processes, the
threads that wait for them, and a file of locks. Does not know: which kernels.

The part of Triton's compiler that is written in Python holds the interpreter's lock, so threads compile hardly faster
than one. The processes are forked, which takes milliseconds, and only when a kernel is missing: they have the kernels'
modules loaded, use no GPU, and leave what they compile in Triton's cache on disk, where this process finds it.

A lock that another thread holds at the fork is never released in the child. So no thread that loads anything runs then,
and children that answer nothing for ``STUCK_S`` are given up: what they should have compiled is compiled here.

Ranks and replicas that start together miss the same kernels. Each is compiled by the process that locks it first; the
others compile other kernels meanwhile. The locks are bytes of an empty file beside Triton's cache, one for each kernel,
so that a process that ends leaves nothing locked; where files cannot be locked, every process compiles for itself.

Of the kernels that wait for a process, the slowest is compiled next: one that begins last is waited for alone. The C
code that launches a kernel is compiled when its binary is loaded, once for all kernels of one signature.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import multiprocessing
import os
import signal
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor, TimeoutError, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from importlib import import_module
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from queue import PriorityQueue
from typing import IO, Any, NoReturn

import triton
from triton import knobs
from triton.compiler import CompiledKernel
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.runtime.jit import JITCallable, JITFunction

from weft.errors import ConfigError
from weft.processes import preload
from weft.processes.lifeline import die_with_parent
from weft.runner.compile_order import compile_seconds

logger = logging.getLogger(__name__)

STUCK_S = 60.0
"""Seconds. The slowest kernels take three."""

_LOOK_S = 0.02
_THREADS = 4
"""For each process: most wait for a launcher, or for a kernel that another rank compiles."""
_NAME = "weft-compiling.lock"
_FLOCK = "@hhqqi4x"
"""C's ``struct flock``: type, whence, start, length, process id."""


class CompileProcesses:
    """What ``triton.AsyncCompileMode`` submits to, from one thread, while ``compile`` stands in for ``triton.compile``.
    Made by the thread that submits. The body ends when all is compiled.

    Args:
        count: of processes.
        load: puts a kernel on the device and compiles its launcher; called in threads.
    """

    def __init__(self, count: int, load: Callable[[CompiledKernel], None]) -> None:
        self._count, self._load = count, load
        self._threads, self._loaders = ThreadPoolExecutor(_THREADS * count), ThreadPoolExecutor(count)
        self._free = threading.Semaphore(count)  # processes
        self._waiting: PriorityQueue[_Waiting] = PriorityQueue()
        self._launchers: dict[str, threading.Event] = {}
        self._loading: list[Future[CompiledKernel]] = []
        self._pool: ProcessPoolExecutor | None = None
        self._children: list[BaseProcess] = []
        self._answered = 0.0
        self._submitted = 0
        self._submitter = threading.get_ident()

    def submit(self, compile_function: Callable[[], CompiledKernel]) -> Future[CompiledKernel]:
        """The kernel, when it is on the device. ``compile_function`` calls ``compile`` with fixed arguments."""
        try:
            kernel = compile_function()
        except _MissingError as missing:
            with suppress(BrokenProcessPool):
                self._processes()
            kernel_of, self._submitted = Future[CompiledKernel](), self._submitted + 1
            order = -compile_seconds(missing.src.fn.__name__), self._submitted
            self._waiting.put((*order, missing, compile_function, kernel_of))
            self._threads.submit(self._compile_slowest)
            return kernel_of
        self._loading.append(self._loaders.submit(self._loaded, kernel))
        return self._loading[-1]

    def compile(self, src: Any, **options: Any) -> CompiledKernel:
        """As ``triton.compile``; in the thread that submits, only what the cache holds.

        Raises:
            _MissingError: it is not there.
            ConfigError: it cannot be written into the cache.
        """
        if threading.get_ident() != self._submitter:
            with _cache_in_use():
                return triton.compile(src, **options)
        src.make_ir = _raise_missing  # what Triton calls first if it has to compile
        try:
            with _cache_in_use():
                return triton.compile(src, **options)
        except _MissingError as missing:
            missing.src, missing.options = src, options
            raise
        finally:
            del src.make_ir

    def _compile_slowest(self) -> None:
        """Of what waits now, in the next process that is free."""
        with self._free:
            *_, missing, compile_function, kernel_of = self._waiting.get_nowait()
            is_compiled = self._compiled_elsewhere(missing.src, missing.options)
        try:
            kernel_of.set_result(self._when_compiled(is_compiled, missing, compile_function))
        except BaseException as error:
            kernel_of.set_exception(error)

    def _compiled_elsewhere(self, src: Any, options: dict[str, Any]) -> bool:
        """The kernel is in Triton's cache, or this process has to compile it: another was killed, or the kernel is
        wrong. False: processes of others compile it."""
        ForkingPickler.register(type(src.fn), _by_name)
        try:
            return self._wait(self._processes().submit(_compile, src, options))
        except Exception:
            return True

    def _processes(self) -> ProcessPoolExecutor:
        if self._pool is None:
            preload.wait()
            wait(self._loading)
            before = multiprocessing.active_children()
            self._pool = ProcessPoolExecutor(self._count, multiprocessing.get_context("fork"), _obey, (os.getpid(),))
            self._answered = time.monotonic()
            self._pool.submit(os.getpid)  # forks all of them, here and now
            self._children = [child for child in multiprocessing.active_children() if child not in before]
        return self._pool

    def _when_compiled(
        self, is_compiled: bool, missing: _MissingError, compile_function: Callable[[], CompiledKernel]
    ) -> CompiledKernel:
        while not is_compiled and wait_for_lock(missing.src, missing.options):
            with self._free:
                is_compiled = self._compiled_elsewhere(missing.src, missing.options)
        return self._loaded(compile_function())

    def _wait(self, compiled: Future[bool]) -> bool:
        """Its result, or nothing is done for too long: then all that waits here gets ``BrokenProcessPool``."""
        while True:
            try:
                is_compiled = compiled.result(STUCK_S)
                self._answered = time.monotonic()
                return is_compiled
            except TimeoutError:
                if compiled.done():  # compiling itself ended so
                    raise
                if time.monotonic() - self._answered >= STUCK_S:
                    logger.warning("no kernel was compiled in %g s; the processes are given up", STUCK_S)
                    self._kill()
                    self._answered = time.monotonic()

    def _kill(self) -> None:
        for child in self._children:
            child.kill()

    def _loaded(self, kernel: CompiledKernel) -> CompiledKernel:
        """The first kernel of a signature before the others, which then find its launcher in the cache."""
        mine = threading.Event()
        built = self._launchers.setdefault(str(kernel.src.signature), mine)
        if built is not mine:
            built.wait()
        try:
            with _cache_in_use():
                self._load(kernel)
        finally:
            mine.set()
        return kernel

    def __enter__(self) -> CompileProcesses:
        return self

    def __exit__(self, *exception: object) -> None:
        self._loaders.shutdown()
        self._threads.shutdown()
        if self._pool is not None:
            self._kill()  # they have nothing left to do
            self._pool.shutdown()


class _MissingError(Exception):
    """A kernel is not in Triton's cache. ``src``, ``options``: arguments of ``triton.compile``."""

    src: Any
    options: dict[str, Any]


_Waiting = tuple[float, int, _MissingError, Callable[[], CompiledKernel], Future[CompiledKernel]]
"""Less the earlier, the number of the submission, what is missing, how it is compiled here, and what waits for it."""


def _raise_missing(*args: Any, **options: Any) -> NoReturn:
    raise _MissingError


_CANNOT_WRITE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENOTDIR, errno.EEXIST)


@contextmanager
def _cache_in_use() -> Iterator[None]:
    """Raises ConfigError where the body may not write, or has no room; other errors may be gone at the next start."""
    try:
        yield
    except OSError as error:
        if error.errno not in _CANNOT_WRITE:
            raise
        raise ConfigError(
            f"a kernel cannot be compiled: {error}; kernels are kept in {knobs.cache.dir}, which must be writable and "
            "have room: give the folder to this user and make room, or set TRITON_CACHE_DIR to another one"
        ) from error


# -- in a process ------------------------------------------------------------------------------------------------------


def _obey(parent_pid: int) -> None:
    """End with the parent, and by it alone: a terminal interrupts the whole group. Leave no intermediate code in the
    cache: every start would read it."""
    triton.knobs.compilation.store_binary_only = True
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent(parent_pid)


def _compile(src: Any, options: dict[str, Any]) -> bool:
    """Leave the kernel in Triton's cache. False: another process is doing that."""
    with kernel_lock(src, options) as is_mine:
        if is_mine:
            triton.compile(src, **options)
        return is_mine


def _by_name(function: JITCallable) -> tuple[Any, ...]:
    """How a function of Triton travels: the process has it under the same name. With the key that it has here: Triton's
    key of a function depends on which functions it has met before, and the kernel would not be found under another."""
    return _find, (function.fn.__module__, function.fn.__qualname__, function.cache_key)


def _find(module: str, name: str, cache_key: str) -> Any:
    function = getattr(import_module(module), name)
    function.hash = cache_key
    return function


for kind in (JITFunction, GluonJITFunction):
    ForkingPickler.register(kind, _by_name)


# -- locks -----------------------------------------------------------------------------------------------------------


@contextmanager
def kernel_lock(src: Any, options: Mapping[str, Any]) -> Iterator[bool]:
    """Hold the lock of the kernel that ``triton.compile(src, **options)`` makes. False: another process has it."""
    try:
        file = _opened()
    except OSError:
        yield True
        return
    with file:  # closing it unlocks
        is_mine = True
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _place(src, options))
        except (BlockingIOError, PermissionError):  # either may say that it is locked
            is_mine = False
        except OSError:
            pass
        yield is_mine


def wait_for_lock(src: Any, options: Mapping[str, Any], limit_s: float = STUCK_S) -> bool:
    """Until no other process holds the lock. False, and the caller had better compile itself: nothing can be locked
    after all, or another process has held it for ``limit_s`` seconds, which a warning names."""
    place, deadline = _place(src, options), time.monotonic() + limit_s
    try:
        with _opened() as file:
            while True:
                try:
                    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
                    return True
                except BlockingIOError:
                    if time.monotonic() >= deadline:
                        holder = _holder(file, place)
                        logger.warning(
                            "process %s has been compiling a kernel for %g s; it is compiled here too", holder, limit_s
                        )
                        return False
                time.sleep(_LOOK_S)
    except OSError:
        return False


def _holder(file: IO[str], place: int) -> int:
    """The id of the process that has locked the byte; 0 if it is not known. Raises OSError."""
    asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, place, 1, 0)
    return int(struct.unpack(_FLOCK, fcntl.fcntl(file, fcntl.F_GETLK, asked))[-1])


def _place(src: Any, options: Mapping[str, Any]) -> int:
    """The kernel's byte."""
    return int(hashlib.sha256(f"{src.hash()} {dict(options)}".encode()).hexdigest()[:15], 16)


def _opened() -> IO[str]:
    folder = Path(knobs.cache.dir)
    folder.mkdir(parents=True, exist_ok=True)
    return (folder / _NAME).open("a")
