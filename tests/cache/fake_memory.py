"""A memory that knows what should be where: pages and slots hold hashes of the token prefix they stand for.

Runs a manager's copies and stores as a runner would, and asserts at every read that the content is that of a cold run.
Whatever the manager gets wrong (a page shared too far, a state of another position, a slot reused too early) shows as
a wrong hash.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from weft.cache.manager import Lease, Manager


def prefix_hashes(tokens: Sequence[int]) -> list[int]:
    """``h[p]`` stands for the first ``p`` tokens; ``h[0]`` is 0."""
    hashes = [0]
    for token in tokens:
        hashes.append(hash((hashes[-1], token)))
    return hashes


@dataclass(eq=False)
class Running:
    """A request on the fake memory. ``tokens`` may be longer than what has been fed."""

    tokens: list[int]
    lease: Lease
    fed: int = 0
    salt: str | None = None
    started: bool = False


@dataclass
class FakeMemory:
    manager: Manager
    pages: dict[tuple[int, int], int] = field(default_factory=dict)
    slots: dict[int, int] = field(default_factory=dict)

    def start(self, running: Running) -> None:
        """Run the copies that come with a lease."""
        lease, size = running.lease, self.manager.spec.page_size
        if lease.page_copy is not None:
            src, dst = lease.page_copy
            for offset in range(size):
                self.pages[dst, offset] = self.pages.get((src, offset), -1)
        if lease.state_fork is not None:
            src, dst = lease.state_fork
            self.slots[dst] = self.slots[src]
        running.fed, running.started = lease.num_cached_tokens, True

    def launch(self, running: Running, num_tokens: int) -> bool:
        """Feed ``num_tokens`` tokens. False if no page could be had."""
        lease, start = running.lease, running.fed
        if self.manager.allocate(lease, start + num_tokens) is None:
            return False
        checkpoints = self.manager.allocate_checkpoints(lease, start, num_tokens)
        if not running.started:
            self.start(running)
        self.manager.commit(lease, start + num_tokens)
        self.feed(running, num_tokens, checkpoints)
        self.manager.confirm(lease, running.fed)
        return True

    def feed(self, running: Running, num_tokens: int, checkpoints: list[tuple[int, int]]) -> None:
        lease, size, start = running.lease, self.manager.spec.page_size, running.fed
        hashes = prefix_hashes(running.tokens[: start + num_tokens])
        if lease.state_slot and start:
            assert self.slots[lease.state_slot] == hashes[start], f"the working state is not that of {start} tokens"
        for position in range(start, start + num_tokens):
            if position >= lease.write_start:
                self.pages[lease.pages[position // size], position % size] = hashes[position + 1]
        for position in range(start + num_tokens):
            held = self.pages[lease.pages[position // size], position % size]
            assert held == hashes[position + 1], f"the KV of position {position} belongs to another sequence"
        if lease.state_slot:
            self.slots[lease.state_slot] = hashes[start + num_tokens]
            for position, slot in checkpoints:
                assert start < position <= start + num_tokens
                self.slots[slot] = hashes[position]
        running.fed += num_tokens

    def check_tree(self) -> None:
        """Everything the tree claims to hold is what a cold run would have put there."""
        size = self.manager.spec.page_size
        for node in self.manager.tree.nodes():
            tokens = [int(t) for each in reversed(list(node.path())) for t in each.tokens]
            hashes = prefix_hashes(tokens)
            first = node.start // size
            for position in range(first * size, node.end):
                held = self.pages[node.pages[position // size - first], position % size]
                assert held == hashes[position + 1], f"the tree's KV of position {position} is wrong"
            for position, checkpoint in node.checkpoints.items():
                assert self.slots[checkpoint.slot] == hashes[position], f"the tree's state at {position} is wrong"
