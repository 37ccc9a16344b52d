"""An engine process without a model, for measuring the server alone: ``python -m benchmarks.instant_engine``.

It repeats the user's words, one token per request and step, at once or (priority ``SLOW``) every 10 ms. If
``$WEFT_STEP_TIMES`` is set, the moments of its steps and the first step of each request are written there at the end.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from tests.server.fake_engine import FakeCore, start
from weft.engine import wire
from weft.engine.channel import EngineChannel, EngineStart
from weft.engine.process import main
from weft.request import Request


class InstantCore(FakeCore):
    """Remembers when each step ended, seconds of ``time.monotonic()``, and each request's first step."""

    def __init__(self) -> None:
        super().__init__(per_step=1)
        self.moments: list[float] = []
        self.first_steps: dict[str, int] = {}

    def step(self) -> list[Request]:
        changed = super().step()
        for request in changed:
            self.first_steps.setdefault(request.request_id.rpartition("/")[0], len(self.moments))
        self.moments.append(time.monotonic())
        return changed

    def shutdown(self) -> None:
        super().shutdown()
        if path := os.environ.get("WEFT_STEP_TIMES"):
            Path(path).write_text(json.dumps({"moments": self.moments, "first_steps": self.first_steps}))


def begin(message: EngineStart, channel: EngineChannel) -> tuple[InstantCore, wire.Capacity]:
    _, capacity = start(message, channel)
    return InstantCore(), capacity


if __name__ == "__main__":
    sys.exit(main(begin))
