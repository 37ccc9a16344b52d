"""Compiling Triton kernels in several processes.

Job: have kernels compiled that are not in Triton's cache, and put all of them on the device. Owns: the processes, the
threads that wait for them, and a file of locks. Does not know: which kernels.

The part of Triton's compiler that is written in Python holds the interpreter's lock, so several threads compile hardly
faster than one. The processes are forked when the first kernel is missing, which takes milliseconds. They inherit the
kernels' modules and use no GPU. They write binaries to Triton's cache on disk, where this process finds them.

A lock that another thread holds at the fork is never released in the child. Therefore the fork waits until no thread
loads anything. If no child answers for ``STUCK_S``, the children are killed and this process compiles their kernels.

Ranks and replicas that start together miss the same kernels. The process that locks a kernel first compiles it, and the
other processes continue with other kernels. The lock of a kernel is a byte of an empty file in the folder of Triton's
cache, so the operating system unlocks it when a process ends. Where files cannot be locked, every process compiles all
kernels.

The slowest of the waiting kernels is compiled next. Started last, it would delay the end alone. The C code that
launches a kernel is compiled when its binary is loaded, once for all kernels of one signature.
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
"""Seconds without any answer after which the processes are killed. The slowest kernels take three seconds."""

_LOOK_S = 0.02
_THREADS = 4
"""Threads per process. Most threads wait for a launcher, or for a kernel that another rank compiles."""
_NAME = "weft-compiling.lock"
_FLOCK = "@hhqqi4x"
"""C's ``struct flock``: type, whence, start, length, process id."""


class CompileProcesses:
    """The executor of ``triton.AsyncCompileMode``, while ``compile`` replaces ``triton.compile``. Only the thread that
    creates it submits. The ``with`` block ends when all kernels are compiled.

    Args:
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
        """Return a future of the kernel on the device. ``compile_function`` calls ``compile`` with fixed arguments."""
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
        """Do the work of ``triton.compile``. The thread that submits only reads the cache.

        Raises:
            _MissingError: the cache does not hold the kernel.
            ConfigError: the cache cannot be written.
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
        """Wait for a free process, and have it compile the slowest of the waiting kernels."""
        with self._free:
            *_, missing, compile_function, kernel_of = self._waiting.get_nowait()
            is_compiled = self._compile_in_child(missing.src, missing.options)
        try:
            kernel_of.set_result(self._when_compiled(is_compiled, missing, compile_function))
        except BaseException as error:
            kernel_of.set_exception(error)

    def _compile_in_child(self, src: Any, options: dict[str, Any]) -> bool:
        """Have a child compile the kernel. Returns False if another rank is compiling it.

        True if the kernel is in Triton's cache, or if this process has to compile it because the child failed or was
        killed.
        """
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
            fork = multiprocessing.get_context("fork")
            self._pool = ProcessPoolExecutor(self._count, fork, _begin_child, (os.getpid(),))
            self._answered = time.monotonic()
            self._pool.submit(os.getpid)  # forks all of them, here and now
            self._children = [child for child in multiprocessing.active_children() if child not in before]
        return self._pool

    def _when_compiled(
        self, is_compiled: bool, missing: _MissingError, compile_function: Callable[[], CompiledKernel]
    ) -> CompiledKernel:
        while not is_compiled and wait_for_lock(missing.src, missing.options):
            with self._free:
                is_compiled = self._compile_in_child(missing.src, missing.options)
        return self._loaded(compile_function())

    def _wait(self, compiled: Future[bool]) -> bool:
        """Wait for a child's result. If no child answers for too long, kill all; their results then fail."""
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
        """Load a kernel. The first of a signature is loaded before the others, which find its launcher in the cache."""
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
"""Order (the slowest kernel first), number of the submission, the missing kernel, the function that compiles it in this
process, and the future of the caller."""


def _raise_missing(*args: Any, **options: Any) -> NoReturn:
    raise _MissingError


_CANNOT_WRITE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENOTDIR, errno.EEXIST)


@contextmanager
def _cache_in_use() -> Iterator[None]:
    """Raise ConfigError if the body may not write the cache or the disk is full. Other errors may be temporary."""
    try:
        yield
    except OSError as error:
        if error.errno not in _CANNOT_WRITE:
            raise
        raise ConfigError(
            f"a kernel cannot be compiled: {error}; kernels are kept in {knobs.cache.dir}, which must be writable and "
            "have room: give the folder to this user and make room, or set TRITON_CACHE_DIR to another one"
        ) from error


def _begin_child(parent_pid: int) -> None:
    """Prepare a child. It ignores interrupts, which a terminal sends to the whole group, and ends with its parent. It
    stores binaries only, because every start would read intermediate code in the cache."""
    triton.knobs.compilation.store_binary_only = True
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent(parent_pid)


def _compile(src: Any, options: dict[str, Any]) -> bool:
    """Compile the kernel into Triton's cache. Returns False if another process is compiling it."""
    with kernel_lock(src, options) as is_mine:
        if is_mine:
            triton.compile(src, **options)
        return is_mine


def _by_name(function: JITCallable) -> tuple[Any, ...]:
    """Pickle a function of Triton by its name, since the child has it under the same name, and by its cache key.

    Triton's key of a function depends on the functions that Triton has seen before. Under another key this process
    would not find the kernel.
    """
    return _find, (function.fn.__module__, function.fn.__qualname__, function.cache_key)


def _find(module: str, name: str, cache_key: str) -> Any:
    function = getattr(import_module(module), name)
    function.hash = cache_key
    return function


for kind in (JITFunction, GluonJITFunction):
    ForkingPickler.register(kind, _by_name)


@contextmanager
def kernel_lock(src: Any, options: Mapping[str, Any]) -> Iterator[bool]:
    """Lock the kernel that ``triton.compile(src, **options)`` makes. Yields False if another process holds the lock."""
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
    """Wait until no other process holds the lock.

    Returns False if the caller should compile the kernel itself: files cannot be locked, or another process has held
    the lock for ``limit_s`` seconds. A warning names that process.
    """
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
    """Return the id of the process that has locked the byte, or 0 if unknown. Raises OSError."""
    asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, place, 1, 0)
    return int(struct.unpack(_FLOCK, fcntl.fcntl(file, fcntl.F_GETLK, asked))[-1])


def _place(src: Any, options: Mapping[str, Any]) -> int:
    """Return the offset of the kernel's byte in the file of locks."""
    return int(hashlib.sha256(f"{src.hash()} {dict(options)}".encode()).hexdigest()[:15], 16)


def _opened() -> IO[str]:
    folder = Path(knobs.cache.dir)
    folder.mkdir(parents=True, exist_ok=True)
    return (folder / _NAME).open("a")
