"""Loading torch and creating the CUDA context in parallel threads, for a shorter start.

What needs no Python is done in threads while the interpreter reads modules: loading torch's shared libraries is a third
of importing it, and the CUDA driver takes as long for its first use.

What goes wrong here goes wrong again, with a message, where torch does the same.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import os
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from weft.processes.collector import collector_off

_LIBRARIES = (("libtorch_global_deps.so", ctypes.RTLD_GLOBAL), ("libtorch.so", ctypes.RTLD_LOCAL))
"""As torch loads them itself, before its Python library."""

_DRIVER = "libcuda.so.1"

_begun: list[threading.Thread] = []


@functools.cache
def load_torch_libraries() -> threading.Thread:
    """Begin to load what ``import torch`` will look for."""
    return _meanwhile(_load_torch_libraries)


@functools.cache
def create_cuda_context() -> threading.Thread:
    """Begin to create the primary context of the first GPU, if there is one and torch is built for it."""
    return _meanwhile(_create_cuda_context)


@functools.cache
def use_gpu() -> threading.Thread:
    """Begin the first operations on the first GPU, after the import of torch."""
    return _meanwhile(_use_gpu)


@functools.cache
def look_up_triton_key() -> threading.Thread:
    """Begin to look up what Triton finds compiled kernels by, which the first start on a machine computes."""
    from weft.platforms.triton_key import remember_triton_key

    def look_up() -> None:
        with suppress(Exception):  # of a Triton that is not there, or is another one
            remember_triton_key()

    return _meanwhile(look_up)


def import_torch() -> None:
    """Import torch, after what does not wait for its libraries."""
    load_torch_libraries()
    with collector_off():
        import numpy  # noqa: F401

        if _has_cuda() and has_driver():
            with suppress(ImportError):  # of a Triton without it
                import triton.experimental.gluon.language.nvidia.hopper  # noqa: F401
            _meanwhile(_build_triton_driver)
            look_up_triton_key()
        import torch  # noqa: F401
    if create_cuda_context.cache_info().currsize:
        use_gpu()


def import_torch_for_gpu(settings: Mapping[str, Any]) -> None:
    """Import torch now, if resolving these settings will: to ask it for a GPU."""
    if settings.get("device") != "cpu" and has_driver():
        import_torch()


def has_driver() -> bool:
    """The library of NVIDIA's driver is there."""
    try:
        ctypes.CDLL(_DRIVER)
    except OSError:
        return False
    return True


def has_bytecode() -> bool:
    """Python finds Weft's modules compiled, and torch's if it is there. Else every process that may not keep what it
    compiles does so anew: torch and what it imports take two seconds."""
    specs = (find_spec(name) for name in ("torch", "weft"))
    return all(spec is None or spec.cached is None or Path(spec.cached).exists() for spec in specs)


def wait() -> None:
    """Until all that was begun is done. The end of the process waits too: a thread that comes back from an operation of
    torch while Python ends would abort the process, and with it its exit status."""
    for thread in _begun:
        thread.join()


atexit.register(wait)


def _meanwhile(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, name="preload", daemon=True)
    _begun.append(thread)
    thread.start()
    return thread


def _library_folder() -> Path | None:
    spec = find_spec("torch")
    return Path(spec.origin).parent / "lib" if spec is not None and spec.origin is not None else None


def _has_cuda() -> bool:
    """torch is built for it."""
    folder = _library_folder()
    return folder is not None and (folder / "libtorch_cuda.so").exists()


def _load_torch_libraries() -> None:
    folder = _library_folder()
    if folder is None:
        return
    dlopen = ctypes.CDLL(None).dlopen  # this call gives up the interpreter's lock, CDLL() itself would hold it
    dlopen.argtypes, dlopen.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p
    for name, mode in _LIBRARIES:
        if not dlopen(os.fsencode(folder / name), mode | os.RTLD_NOW):
            return


def _build_triton_driver() -> None:
    """Triton's part in C, which the first start on a machine compiles; later ones load it after torch."""
    with suppress(Exception):
        from triton import knobs
        from triton.backends.nvidia.driver import CudaUtils

        if not any(Path(knobs.cache.dir).glob("*/cuda_utils*")):
            CudaUtils()


def _create_cuda_context() -> None:
    if not _has_cuda() or not has_driver():
        return
    driver = ctypes.CDLL(_DRIVER)
    handle, context = ctypes.c_int(), ctypes.c_void_p()
    if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(handle), 0) == 0:
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), handle)


def _use_gpu() -> None:
    """What the first operations bring with them: torch's state of the GPU, kernels, and the library of products."""
    if not _has_cuda() or not has_driver():
        return
    import torch

    with suppress(RuntimeError):  # what goes wrong here goes wrong again
        x = torch.zeros(16, 16, dtype=torch.bfloat16, device="cuda")
        torch.mm(x, x).index_select(0, torch.zeros(1, dtype=torch.int64, device="cuda"))
