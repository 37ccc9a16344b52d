"""Loading torch and creating the CUDA context in parallel threads, for a shorter start.

Work that needs no Python runs in threads while the interpreter imports modules. Loading torch's shared libraries is a
third of the import of torch, and the first use of the CUDA driver takes as long.

Errors here are ignored: torch repeats the same call later and reports the error.
"""

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
"""The libraries and modes with which torch loads them, before its Python library."""

_DRIVER = "libcuda.so.1"

_begun: list[threading.Thread] = []


@functools.cache
def load_torch_libraries() -> threading.Thread:
    """Start to load the shared libraries that ``import torch`` needs."""
    return _meanwhile(_load_torch_libraries)


@functools.cache
def create_cuda_context() -> threading.Thread:
    """Start to create the primary context of the first GPU, if there is a GPU and torch is built for CUDA."""
    return _meanwhile(_create_cuda_context)


@functools.cache
def use_gpu() -> threading.Thread:
    """Start the first operations on the first GPU. Call it after the import of torch."""
    return _meanwhile(_use_gpu)


@functools.cache
def look_up_triton_key() -> threading.Thread:
    """Start to look up the key under which Triton finds compiled kernels. The first start on a machine computes the
    key."""
    from weft.platforms.triton_key import remember_triton_key

    def look_up() -> None:
        with suppress(Exception):  # Triton is missing, or has other internals
            remember_triton_key()

    return _meanwhile(look_up)


def import_torch() -> None:
    """Import torch. Imports that do not need its libraries come first."""
    load_torch_libraries()
    with collector_off():
        import numpy  # noqa: F401

        if _has_cuda() and has_driver():
            with suppress(ImportError):  # this Triton has no Gluon
                import triton.experimental.gluon.language.nvidia.hopper  # noqa: F401
            _meanwhile(_build_triton_driver)
            look_up_triton_key()
        import torch  # noqa: F401
    if create_cuda_context.cache_info().currsize:
        use_gpu()


def import_torch_for_gpu(settings: Mapping[str, Any]) -> None:
    """Import torch now if resolving the settings will need it to look for a GPU."""
    if settings.get("device") != "cpu" and has_driver():
        import_torch()


def has_driver() -> bool:
    """Whether the library of NVIDIA's driver can be loaded."""
    try:
        ctypes.CDLL(_DRIVER)
    except OSError:
        return False
    return True


def has_bytecode() -> bool:
    """Whether the modules of Weft, and of torch if installed, have cached bytecode. Without a writable cache every
    process compiles the modules of torch and its dependencies anew, which takes two seconds."""
    specs = (find_spec(name) for name in ("torch", "weft"))
    return all(spec is None or spec.cached is None or Path(spec.cached).exists() for spec in specs)


def wait() -> None:
    """Wait for all threads of this module. Also runs at exit: a thread that returns from torch during the shutdown of
    Python would abort the process and change its exit status."""
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
    """Whether the installed torch is built for CUDA."""
    folder = _library_folder()
    return folder is not None and (folder / "libtorch_cuda.so").exists()


def _load_torch_libraries() -> None:
    folder = _library_folder()
    if folder is None:
        return
    dlopen = ctypes.CDLL(None).dlopen  # this call releases the interpreter lock; CDLL() would hold it
    dlopen.argtypes, dlopen.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p
    for name, mode in _LIBRARIES:
        if not dlopen(os.fsencode(folder / name), mode | os.RTLD_NOW):
            return


def _build_triton_driver() -> None:
    """Compile Triton's C extension if the cache lacks it. Later starts load it after torch."""
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
    """Run the first operations, which initialise torch's GPU state, load kernels, and load the matrix library."""
    if not _has_cuda() or not has_driver():
        return
    import torch

    with suppress(RuntimeError):  # torch reports the same error later
        x = torch.zeros(16, 16, dtype=torch.bfloat16, device="cuda")
        torch.mm(x, x).index_select(0, torch.zeros(1, dtype=torch.int64, device="cuda"))
