"""Host memory for ``FakeMemory``: runs the copies of a tier as a runner would, on hashes instead of tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from tests.cache.fake_memory import FakeMemory, Running
from weft.messages import SchedulerOutput, Transfer
from weft.offload.restores import Restores


@dataclass
class TieredMemory(FakeMemory):
    """A memory with a tier below. Copies to the host run before anything is written."""

    restores: Restores | None = None
    host_pages: dict[int, list[int]] = field(default_factory=dict)
    host_states: dict[int, tuple[int, list[int]]] = field(default_factory=dict)
    in_flight: list[Transfer] = field(default_factory=list)

    def start(self, running: Running) -> None:
        self.flush()
        super().start(running)

    def feed(self, running: Running, num_tokens: int, checkpoints: list[tuple[int, int]]) -> None:
        self.flush()
        super().feed(running, num_tokens, checkpoints)

    def flush(self) -> SchedulerOutput:
        """Launch a step: copies to the host run now, copies from the host when ``finish`` is called."""
        assert self.restores is not None
        stores, restores, _ = self.restores.take_orders()
        for transfer in stores:
            self.store(transfer)
        self.restores.done([(transfer.number, 1e-3) for transfer in stores])
        self.in_flight += restores
        return SchedulerOutput(1, [], stores=stores, restores=restores)

    def finish(self) -> None:
        """The oldest copy from the host is done."""
        assert self.restores is not None
        transfer = self.in_flight.pop(0)
        self.restore(transfer)
        self.restores.done([(transfer.number, 1e-3)])

    def _page(self, page: int) -> list[int]:
        return [self.pages.get((page, offset), -1) for offset in range(self.manager.spec.page_size)]

    def store(self, transfer: Transfer) -> None:
        for source, target in transfer.pages:
            self.host_pages[target] = self._page(source)
        for slot, target, page in transfer.states:
            self.host_states[target] = self.slots[slot], self._page(page) if page else []

    def restore(self, transfer: Transfer) -> None:
        for source, target in transfer.pages:
            self.write(target, self.host_pages[source])
        for source, slot, page in transfer.states:
            self.slots[slot], content = self.host_states[source]
            if page:
                self.write(page, content)

    def write(self, page: int, content: list[int]) -> None:
        for offset, value in enumerate(content):
            self.pages[page, offset] = value


def request(name: str, tokens: list[int]) -> Any:
    """A waiting request, as far as restores look at it."""
    return SimpleNamespace(request_id=name, num_tokens=len(tokens))
