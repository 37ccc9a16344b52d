"""Cheaper kernel launches: each call site caches what Triton would work out again.

Job: the decorator ``jit`` of every kernel that the host launches. Owns: per kernel, what was compiled for which
arguments. Does not know: any kernel.

On every launch ``kernel[grid](...)`` of Triton binds arguments to names, formats options as text to look up a compiled
kernel, and calls hooks that nobody has set. Triton's launch takes 12 us; the call of the driver takes 1. An eager step
is a few hundred launches, and a graph is captured by running eager steps. Here the first launch goes through Triton,
and the next one with the same key calls the same C launcher. The key holds everything that affects compilation: device,
compile-time arguments, options, and type and specialisation of every argument (16-byte alignment, the value 1 and
multiples of 16, by Triton's own function).

Triton itself launches interpreted kernels, kernels that need scratch memory, and every kernel while hooks are set or
under an unknown version of Triton. An unknown version needs only ``kernel[grid](...)`` and ``warmup``. One check of
Triton's is left out: that the global constants a kernel was compiled with are still the same.
"""

import functools
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import repeat
from types import SimpleNamespace
from typing import Any

import torch
import triton
from torch import Tensor
from triton import JITFunction, knobs
from triton.compiler import CompiledKernel

from weft.platforms.triton_version import is_known

if hasattr(knobs.language, "fp_fusion_enabled"):  # since 3.9, which warns that later ones will not fuse by default
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

_IS_KNOWN = is_known(triton.__version__)
if _IS_KNOWN:
    from triton._C.libtriton import native_specialize_impl
    from triton.backends.compiler import BaseBackend
    from triton.backends.nvidia import driver as nvidia
    from triton.runtime import build
    from triton.runtime.driver import driver

    _ENTER, _EXIT = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    _TAKES_TUPLE = not hasattr(nvidia, "make_launcher")
    """Whether the launcher takes the arguments as one tuple. Since Triton 3.7 all kernels share one launcher; until 3.6
    each kernel had its own."""


def each_its_own(load: Callable[[str, str], Any]) -> Callable[[str, str], SimpleNamespace]:
    """Wrap ``load(name, path)`` of an extension module, so that each call returns an object of its own.

    All launchers are modules named ``__triton_launcher``. CPython loads a file for the second time by writing its
    functions into the last module of that name, which another thread may be about to read. A kernel then has the
    launcher of another kernel: a launch fails, or passes its arguments in other sizes.
    """
    lock = threading.Lock()

    def load_alone(name: str, path: str) -> SimpleNamespace:
        with lock:
            return SimpleNamespace(**vars(load(name, path)))

    return load_alone


if _IS_KNOWN and not _TAKES_TUPLE:
    build._load_module_from_path = each_its_own(build._load_module_from_path)


def jit(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """``triton.jit`` for kernels that are launched by ``kernel[grid](...)``: run-time arguments come first in the
    kernel and are given by position, compile-time arguments and options by name; the grid is a tuple.

    Args:
        options: as of ``triton.jit``, for example ``do_not_specialize``.
    """
    if function is None:
        return functools.partial(jit, **options)
    return triton.jit(function, **options) if knobs.runtime.interpret else Kernel(function, **options)


class Kernel(JITFunction):
    """A kernel that remembers its launches."""

    def __init__(self, function: Callable[..., Any], **options: Any) -> None:
        super().__init__(function, **options)
        if not _IS_KNOWN:
            return
        at_run_time = [p for p in self.params if not p.is_constexpr]
        assert at_run_time == self.params[: len(at_run_time)], "run-time arguments come first"
        assert not any(p.annotation for p in at_run_time), "a type given in the source would have to be in the key"
        self._specialized = [not p.do_not_specialize for p in at_run_time]
        self._aligned = [not p.do_not_specialize_on_alignment for p in at_run_time]
        self._constants = (None,) * (len(self.params) - len(at_run_time))  # the launcher skips them
        self._launchers: dict[tuple[Any, ...], tuple[Callable[..., None], tuple[Any, ...]]] = {}

    def create_binder(self) -> Any:
        binder = super().create_binder()
        if _IS_KNOWN:
            self.compile = compile_source
        return binder

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return functools.partial(self.launch, grid)

    def key(self, args: tuple[Any, ...], options: Mapping[str, Any]) -> tuple[Any, ...] | None:
        """Return the key of a compiled kernel without the device, or None under an unknown version of Triton."""
        return self._key(args, options) if _IS_KNOWN else None

    def _key(self, args: tuple[Any, ...], options: Mapping[str, Any]) -> tuple[Any, ...]:
        assert len(args) == len(self._specialized), "compile-time arguments are given by name"
        rules = repeat(BaseBackend), args, repeat(False), self._specialized, self._aligned
        return (*map(native_specialize_impl, *rules), *options, *options.values())

    def launch(self, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        """Queue the kernel on the current stream of the current device."""
        if not _IS_KNOWN or _has_hooks() or self.pre_run_hooks:
            super().__getitem__(grid)(*args, **options)
            return
        active = driver.active
        device = active.get_current_device()
        key = (device, *self._key(args, options))
        found = self._launchers.get(key)
        if found is None:
            self._remember(key, self.run(*args, grid=grid, warmup=False, **options))
            return
        launch, fixed = found
        x, y, z = (*grid, 1, 1)[:3]
        args = *args, *self._constants
        launch(x, y, z, active.get_current_stream(device), *fixed, *((args,) if _TAKES_TUPLE else args))

    def _remember(self, key: tuple[Any, ...], kernel: CompiledKernel | None) -> None:
        """Keep the C function of ``kernel.run`` with the values between the stream and the arguments: the kernel, two
        launch attributes, the compile options, no hooks, no scratch memory, and the argument types."""
        if kernel is None:  # a debugger's hook has compiled it
            return
        launcher = kernel.run
        if not isinstance(launcher, nvidia.CudaLauncher):
            return
        if launcher.global_scratch_size or launcher.profile_scratch_size or getattr(launcher, "gsan_enabled", False):
            return
        fixed = [kernel.function, launcher.launch_cooperative_grid, launcher.launch_pdl]
        how_and_hooks, scratch = [kernel.packed_metadata, None, None, None], [None, None]
        if _TAKES_TUPLE:
            fixed += [*how_and_hooks, *scratch, launcher.arg_annotations, launcher.kernel_signature]
        else:
            fixed += [*scratch, *how_and_hooks]
        self._launchers[key] = (launcher.launch, tuple(fixed))


def _has_hooks() -> bool:
    runtime = knobs.runtime
    if runtime.launch_enter_hook is not _ENTER or runtime.launch_exit_hook is not _EXIT:
        return True
    return bool(_ENTER.calls or _EXIT.calls)


Compiler = Callable[..., CompiledKernel]
"""``compiler(src, **options)``, as ``triton.compile``."""

_compiler: Compiler = triton.compile


def compile_source(src: Any, **options: Any) -> CompiledKernel:
    """Compile a kernel with ``triton.compile``, or with the function that ``compiled_by`` set."""
    return _compiler(src, **options)


@contextmanager
def compiled_by(compiler: Compiler) -> Iterator[None]:
    """In the body, kernels are compiled by ``compiler``."""
    global _compiler
    before, _compiler = _compiler, compiler
    try:
        yield
    finally:
        _compiler = before


Handler = Callable[[Kernel, tuple[int, ...], tuple[Any, ...], dict[str, Any]], None]
"""``(kernel, grid, args, options)``: stands in for a launch."""

_HANDLED: list[Handler] = []
"""Handlers that are active now, the innermost last."""


@contextmanager
def launches_handled(handle: Handler) -> Iterator[None]:
    """In the body, ``kernel[grid](*args, **options)`` calls ``handle(kernel, grid, args, options)`` and does no more.
    ``kernel.run(*args, grid=grid, warmup=False, **options)`` is Triton's own launch then, and
    ``kernel.warmup(*args, grid=grid, **options)`` compiles only."""
    before = Kernel.launch

    def instead(self: Kernel, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        handle(self, grid, args, options)

    Kernel.launch = instead  # type: ignore[method-assign]
    _HANDLED.append(handle)
    try:
        yield
    finally:
        Kernel.launch = before  # type: ignore[method-assign]
        _HANDLED.pop()


def new_indices(*shape: int, dtype: torch.dtype = torch.int64, device: torch.device) -> Tensor:
    """Memory for a kernel's results that torch indexes by: zeros where kernels may be compiled and not run."""
    return (torch.zeros if _HANDLED else torch.empty)(shape, dtype=dtype, device=device)
