"""Loading many modules without the garbage collector in the way.

Job: one scope. Owns: nothing. Does not know: what is loaded.

torch and what it brings are some 200,000 objects that stay. While they are made, the collector walks through all of
them again and again: a fifth of the time of the import.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def loading_modules() -> Iterator[None]:
    """Import modules in the body: nothing is collected meanwhile."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
