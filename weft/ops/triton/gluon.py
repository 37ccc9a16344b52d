"""Whether kernels in Gluon can be used, and what its versions call differently.

Gluon is an experimental part of Triton. Kernels take from here what was renamed between the known versions.
"""

import triton

from weft.platforms.triton_version import is_known

GLUON_IS_KNOWN = is_known(triton.__version__)
"""Without it other kernels do the work."""

if GLUON_IS_KNOWN:
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language._core import builtin
    from triton.experimental.gluon.language.nvidia.ampere import async_copy
    from triton.experimental.gluon.language.nvidia.hopper import tma

    threads_load = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared  # until 3.7
    thread_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # until 3.6
    async_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared  # until 3.7

    @builtin
    def reinterpret(tile, dtype, shape, layout, _semantic=None):
        """Shared memory as a tile of another type, shape and layout."""
        method = tile.reinterpret if hasattr(tile, "reinterpret") else tile._reinterpret  # until 3.8
        return method(dtype, shape, layout, _semantic=_semantic)
