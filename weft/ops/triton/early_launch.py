"""Programmatic dependent launch: a kernel's programs start while the kernel before still ends.

Job: programmatic dependent launch (CUDA, compute capability 9.0 and later) for every kernel of the package. Owns: the
rule that makes it safe. Does not know: kernels.

A decode step is a chain of kernels of a few microseconds each. Without early launches every kernel pays for the end of
the previous kernel and for its own start. An early launch may start as soon as every program of the previous kernel has
begun, or has ``release``d it. The rule: every program waits before it reads or writes memory that a kernel of this
package writes in the same step. ``wait`` ends when the previous kernel has ended and its writes are visible. The
previous kernel waited in turn, so all earlier kernels have ended as well. A kernel in which no program waits would
break the chain. Programs without work need not wait if another program of the kernel does.

Before the wait a program may read data from before the forward pass: weights, keys and states of earlier steps, and the
step's metadata. Copies, torch's kernels and the kernels of ``steps/inputs.py`` and ``ops/drafts`` write the metadata.
These launches are ordinary: each waits for everything before it. Their writes are visible to all kernels after the next
ordinary launch, which in a forward pass is the embedding.

A kernel may ``pass_on`` instead, so that the programs of the next kernel start only after its own wait. The next kernel
may then read results of the kernels before both of them before its wait, if it loads past the L1 cache (``.cg``).
``collectives/packed.py`` also says why a kernel may then write before its wait.

The time of the release matters by percents of a step: a kernel that starts early requests its weights early, but takes
places from programs that have work. Where whole steps were faster, a launch overrides the kernel's choice
(``Release``).
"""

import functools
from enum import IntEnum
from typing import Any

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_CAPABILITY = (9, 0)
_MOST_PROGRAMS = tl.constexpr(1056)
"""Eight for each multiprocessor of an H200."""
ALWAYS = tl.constexpr(1 << 30)
"""A number of programs that no kernel has."""


class Release(IntEnum):
    """When a kernel that is launched early lets the next one start: the value of its ``EARLY``."""

    BY_KERNEL = 1
    """Let the next kernel start at this kernel's own ``release``."""
    AT_WAIT = 2
    """Let the next kernel start after this kernel's wait."""
    AT_END = 3


_BY_KERNEL, _AT_WAIT = tl.constexpr(Release.BY_KERNEL.value), tl.constexpr(Release.AT_WAIT.value)


@triton.jit
def release(EARLY: tl.constexpr, MOST: tl.constexpr = _MOST_PROGRAMS):
    """Let the next kernel's programs start where this one's leave room for them: with up to ``MOST`` programs."""
    if EARLY == _BY_KERNEL:  # noqa: SIM102 (known to the compiler, so not one condition with the next)
        if tl.num_programs(0) * tl.num_programs(1) * tl.num_programs(2) <= MOST:
            gdc_launch_dependents()


@triton.jit
def release_by_work(EARLY: tl.constexpr, working, of, MOST: tl.constexpr = _MOST_PROGRAMS):
    """``release`` by a program with work, in a grid of more than ``MOST`` of which only ``working`` of every ``of``
    programs have some. Programs without work end at once, which counts as their release."""
    if EARLY == _BY_KERNEL:
        programs = tl.num_programs(0) * tl.num_programs(1) * tl.num_programs(2)
        if (programs > MOST) & (working * programs <= MOST * of):
            gdc_launch_dependents()


@triton.jit
def wait(EARLY: tl.constexpr):
    """Wait until the kernels before this one have ended and their results are visible."""
    if EARLY:
        gdc_wait()
        if EARLY == _AT_WAIT:
            gdc_launch_dependents()


@triton.jit
def enter(EARLY: tl.constexpr, MOST: tl.constexpr = _MOST_PROGRAMS):
    """``release`` and ``wait``."""
    release(EARLY, MOST)
    wait(EARLY)


@triton.jit
def pass_on(EARLY: tl.constexpr, MOST: tl.constexpr = _MOST_PROGRAMS):
    """``wait`` and ``release``."""
    wait(EARLY)
    release(EARLY, MOST)


def _can_launch_early(device: torch.device) -> bool:
    if device.type != "cuda" or torch.version.cuda is None or knobs.runtime.interpret:
        return False
    return torch.cuda.get_device_capability(device) >= _CAPABILITY


@functools.cache
def early_launch(device: torch.device, release: Release = Release.BY_KERNEL) -> dict[str, Any]:
    """The launch arguments of a kernel: whether it is launched early, for the kernel and for the launch."""
    return {"EARLY": release.value, "launch_pdl": True} if _can_launch_early(device) else {"EARLY": False}
