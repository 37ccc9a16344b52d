"""The requests that hold rows and leases, and the records of their parts in plans and launched steps.

Resources of a request are freed only after its last launched step is done, so nothing that a step reads or writes
changes its owner.
"""

from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from weft.cache.lease import Lease
from weft.cache.manager import Manager
from weft.cache.nodes import Tokens
from weft.request import Request, RequestStatus
from weft.scheduler.queue import SchedulePolicy, sort_key


@dataclass(slots=True, eq=False)
class Running:
    """A request that holds a row and a lease. ``in_flight`` launched steps use them.

    Attributes:
        failed: a step computed NaN for it, so the cache keeps nothing of it.
        retries: it leaves to wait again, and will be computed anew without drafts.
    """

    request: Request
    row: int
    lease: Lease
    in_flight: int = 0
    announced: bool = False
    num_pages_sent: int = 0
    failed: bool = False
    retries: bool = False

    def cache_tokens(self) -> Tokens:
        """The request's tokens on the host, as the prefix cache knows them. The lease has most of them as an array
        already; converting a long prompt takes longer than everything else at a request's end."""
        leased, request = self.lease.tokens, self.request
        generated = request.output_token_ids[len(leased) - request.num_prompt_tokens :]
        return np.concatenate([leased, np.array(generated, leased.dtype)]) if generated else leased


EMPTY: list[Any] = []
"""An empty list shared by all requests of all steps, so never changed."""


class Planned(msgspec.Struct, gc=False):  # created for every request of every step
    """One request's part of the next step: ``num_tokens`` tokens, drafts included. The first ``num_proposed`` drafts
    were proposed, the others are padding (``ON_DEVICE``: unknown). ``follows`` as in ``ScheduledRequest``."""

    running: Running
    num_tokens: int
    drafts: list[int] = EMPTY
    num_proposed: int = 0
    follows: bool = False


class Launched(msgspec.Struct, gc=False):
    """One request's part of a launched step: whether it samples, and the number of tokens fed after it. The last
    ``num_drafts`` of these are drafts, if accepted, of which ``num_proposed`` were proposed."""

    running: Running
    samples: bool
    num_tokens: int
    num_drafts: int = 0
    num_proposed: int = 0


class RunningRequests:
    """Running requests, and requests that left while a launched step uses their resources.

    Attributes:
        running: requests that run, in policy order.
        leaving: requests that have ended, or wait to be computed anew, with steps in flight.
    """

    def __init__(self, manager: Manager, num_rows: int, policy: SchedulePolicy) -> None:
        self._manager, self._policy = manager, policy
        self._free_rows = list(range(num_rows - 1, -1, -1))
        self._finished_rows: list[int] = []
        self.running: list[Running] = []
        self.leaving: list[Running] = []

    @property
    def has_room(self) -> bool:
        return bool(self._free_rows)

    def find(self, request: Request) -> Running:
        """Return the record of a request that holds a row."""
        return next(r for r in (*self.running, *self.leaving) if r.request is request)

    def admit(self, request: Request, lease: Lease) -> Running:
        """Run a request. It gets a row, and its cached tokens count as computed."""
        request.status, request.num_computed_tokens = RequestStatus.RUNNING, lease.num_cached_tokens
        running = Running(request, self._free_rows.pop(), lease)
        self.running.append(running)
        self.running.sort(key=lambda r: sort_key(self._policy, r.request))
        return running

    def preempt(self, victim: Running) -> None:
        """Take all resources from a request without steps in flight. The cache keeps what it computed."""
        assert victim.in_flight == 0 and victim.request.num_pending == 0
        self.running.remove(victim)
        self._manager.preempt(victim.lease, victim.cache_tokens())
        self._free_row(victim)

    def leave(self, running: Running) -> None:
        """Stop running a request. ``release_if_idle`` frees its resources."""
        self.running.remove(running)
        self.leaving.append(running)

    def release_if_idle(self, running: Running) -> bool:
        """Free the resources of a request that has left, once no launched step uses them. Returns whether it did."""
        if running.in_flight or running not in self.leaving:
            return False
        self.leaving.remove(running)
        self._manager.release(running.lease, running.cache_tokens(), keep=not running.failed)
        self._free_row(running)
        return True

    def _free_row(self, running: Running) -> None:
        self._free_rows.append(running.row)
        self._finished_rows.append(running.row)

    def take_finished_rows(self) -> list[int]:
        """Return the rows that were freed since the previous call."""
        rows, self._finished_rows = self._finished_rows, []
        return rows

    def check(self) -> None:
        """Assert that every row has one owner. Running requests have pages for their tokens."""
        rows = [r.row for r in self.running + self.leaving]
        assert len(rows) == len(set(rows)) and not set(rows) & set(self._free_rows), "a row has two owners"
        for running in self.running:
            request = running.request
            assert request.status is RequestStatus.RUNNING and request.finish_reason is None
            assert request.num_computed_tokens <= len(running.lease.pages) * self._manager.spec.page_size
            assert 0 <= request.num_computed_tokens <= request.num_tokens
