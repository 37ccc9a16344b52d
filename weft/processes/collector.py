"""When Python's garbage collector runs: not during a start, not during a capture.

Two things want none. Loading torch makes some 200,000 objects that stay, and the collector would walk through all of
them again and again: a fifth of the time of the import. And a tensor freed in the middle of a capture would spoil it.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


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
