"""A device that is behind the host, as a GPU is: launched steps run when their result is asked for, or before that.

On the CPU a step has run when ``launch`` returns, so what the host does while a step is in flight never meets it. Here
it does: a page or slot that is given back before the results of its last step are in, and then poisoned, shows.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any

from weft import LLM
from weft.cache.manager import Manager
from weft.messages import ModelOutput, SchedulerOutput


class Owned:
    """The pages that each row of the runner reads and writes, collected from the given steps."""

    def __init__(self) -> None:
        self._pages: dict[int, list[int]] = {}

    def check(self, step: SchedulerOutput, manager: Manager) -> None:
        """Assert that nothing that ``step`` uses, which runs now, is free."""
        pages, slots = set(manager.pages._free), set(manager.slots._free)
        for new in step.new_requests:
            self._pages[new.row] = []
        for order in step.requests:
            used = self._pages.setdefault(order.row, [])
            used += order.new_pages
            assert not pages & set(used), f"a step runs on pages that were given back: {pages & set(used)}"
            written = {order.state_slot, *(slot for _, slot in order.checkpoints)} - {0}
            assert not slots & written, f"a step runs on slots that were given back: {slots & written}"


class LateDevice:
    """Stands before an engine's executor.

    Args:
        rng: decides at every launch and result whether a waiting step runs now; None: each runs when it has to.
        before: called with the step just before it runs.
    """

    def __init__(
        self, llm: LLM, rng: random.Random | None = None, before: Callable[[SchedulerOutput], None] = lambda step: None
    ) -> None:
        self._executor = executor = llm._core._executor
        self._rng, self._before, self._manager, self._owned = rng, before, llm._core.manager, Owned()
        self._launch, self._result = executor.launch, executor.result
        self._waiting: deque[tuple[SchedulerOutput, tuple[Any, ...]]] = deque()
        self._num_run = 0
        self.num_late = self.num_followed = 0
        executor.launch, executor.result = self.launch, self.result  # type: ignore[method-assign]

    def launch(self, scheduler_output: SchedulerOutput, *arguments: Any) -> None:
        self._run_some()
        self._waiting.append((scheduler_output, arguments))
        self.num_followed += any(request.follows for request in scheduler_output.requests)
        self._run_some()

    def result(self) -> ModelOutput:
        self._run_some()
        if not self._num_run:
            self.num_late += len(self._waiting) > 1
            self._run()
        self._num_run -= 1
        return self._result()

    def _run_some(self) -> None:
        while self._waiting and self._rng is not None and self._rng.random() < 0.3:
            self._run()

    def _run(self) -> None:
        scheduler_output, arguments = self._waiting.popleft()
        self._owned.check(scheduler_output, self._manager)
        self._before(scheduler_output)
        self._launch(scheduler_output, *arguments)
        self._num_run += 1
