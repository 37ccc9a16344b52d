"""Memory that nobody owns, but that a copy to the tier below has yet to read. It must not be poisoned before."""

from __future__ import annotations

from typing import Any

from weft import LLM
from weft.messages import SchedulerOutput, Transfer


class Unread:
    """The sources of copies to the host that were ordered and have not run."""

    def __init__(self, llm: LLM) -> None:
        self._restores = restores = llm._core.scheduler.restores
        self._sent: list[Transfer] = []
        if restores is not None:
            take = restores.take_orders

            def taken() -> tuple[list[Transfer], list[Transfer], list[int]]:
                orders = take()
                self._sent += orders[0]
                return orders

            restores.take_orders = taken  # type: ignore[method-assign]

    def before(self, step: SchedulerOutput) -> tuple[set[int], set[int]]:
        """Pages and slots that copies have to read, ``step`` included, which runs now."""
        if self._restores is None:
            return set(), set()
        orders: list[Any] = [self._restores.tier._orders, *self._sent]
        pages = {source for order in orders for source, _ in order.pages}
        pages |= {page for order in orders for _, _, page in order.states}
        now = {transfer.number for transfer in step.stores}
        self._sent = [transfer for transfer in self._sent if transfer.number not in now]
        return pages, {slot for order in orders for slot, _, _ in order.states}
