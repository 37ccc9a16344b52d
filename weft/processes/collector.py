"""Python's garbage collector, switched off during a start and during a capture.

Loading torch creates about 200,000 permanent objects. The collector would scan them again and again, which takes a
fifth of the import. A tensor that is freed in the middle of a capture would break the capture.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_off() -> Iterator[None]:
    """Disable the garbage collector in the body, and restore its state afterwards."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextmanager
def objects_frozen() -> Iterator[None]:
    """Exempt existing objects from collections in the body. A collection then takes milliseconds instead of a tenth of
    a second. Does nothing if the program has frozen objects before: a thaw would undo its freeze."""
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
