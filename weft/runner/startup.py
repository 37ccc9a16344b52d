"""Where the time of a start goes.

Device work that a stage only queues is counted where the host first waits for it.
"""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)


class StartupTimes:
    """``seconds``: stage -> wall time, in the order in which the stages began."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time the body as stage ``name``; a stage entered again adds up."""
        start = time.perf_counter()
        before = self.seconds.setdefault(name, 0.0)
        try:
            yield
        finally:
            self.seconds[name] = before + time.perf_counter() - start
            logger.info("start-up: %s %.2f s", name, self.seconds[name])
