"""When Python's garbage collector runs: not during a start, not during a capture.

Job: scopes without collections, or with cheap ones. Owns: nothing. Does not know: what happens in them.

Two things want none. Loading torch makes some 200,000 objects that stay, and the collector would walk through all of
them again and again: a fifth of the time of the import. And a tensor freed in the middle of a capture would spoil it.
Scopes that callers enter again and again freeze nothing: each ``gc.freeze`` makes all young garbage old and forgets how
much there is, so that it would never be collected, and ``gc.unfreeze`` also ends a freeze of the caller's own.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_NEVER = 2**31 - 1
"""Collections of younger objects before one of the oldest."""


@contextmanager
def collector_off() -> Iterator[None]:
    """Nothing is collected in the body; afterwards the collector is as it was."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextmanager
def objects_frozen() -> Iterator[None]:
    """A collection in the body looks only at what was made in it, not at the objects of the libraries: milliseconds
    instead of a tenth of a second."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def full_collections_off() -> Iterator[None]:
    """Automatic collections in the body look only at young objects: not at those of the libraries, which takes a tenth
    of a second. What grows old meanwhile is collected after it; the caller's thresholds are as they were."""
    young, middle, old = gc.get_threshold()
    gc.set_threshold(young, middle, _NEVER)
    try:
        yield
    finally:
        gc.set_threshold(young, middle, old)
