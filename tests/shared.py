"""Costly things that tests share: each is open until too many others were asked for."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TypeVar

Key = TypeVar("Key", bound=Hashable)
Thing = TypeVar("Thing")


@contextmanager
def kept_open(
    opening: Callable[[Key], AbstractContextManager[Thing]], at_most: int = 1
) -> Iterator[Callable[[Key], Thing]]:
    """Yields a function that returns what ``opening(key)`` gives. ``at_most`` of them are open; all close before one
    more is opened.

    A fixture of a module cannot do this where one ``parametrize`` gives its parameter and other parameters. Pytest
    makes such a fixture anew for every test.
    """
    with ExitStack() as stack:
        held: dict[Key, Thing] = {}

        def get(key: Key) -> Thing:
            if key not in held:
                if len(held) == at_most:
                    held.clear()
                    stack.close()
                held[key] = stack.enter_context(opening(key))
            return held[key]

        yield get
