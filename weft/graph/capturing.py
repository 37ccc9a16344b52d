"""What every capture at start-up shares: no garbage collection meanwhile, and the memory that it takes.

Job: small helpers around captures. Owns: nothing. Does not know: what is captured.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from weft.collector import collector_off

NUM_WARMUPS = 2
"""Runs before a capture: the first may compile or tune kernels and allocate workspaces, the second shows it is over."""


def reserved_bytes(device: torch.device) -> int:
    """Device memory that this process holds for tensors; 0 on the CPU. What it grows by across a capture belongs to the
    graph: warm-ups take theirs from the common pool, where every other step finds it again."""
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0


def free_text(device: torch.device) -> str:
    """Free device memory for a progress bar; empty on the CPU."""
    if device.type != "cuda":
        return ""
    return f"{torch.cuda.mem_get_info(device)[0] / 2**30:.1f} GiB free"


@contextmanager
def frozen_gc(enabled: bool) -> Iterator[None]:
    """No garbage collection in the body: a tensor freed in the middle of a capture would spoil it."""
    if not enabled:
        yield
        return
    gc.freeze()
    try:
        with collector_off():
            yield
    finally:
        gc.unfreeze()
