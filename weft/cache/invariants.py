"""The invariants of the cache: every page and every slot has exactly one owner, recounted from scratch."""

from collections.abc import Iterable

from weft.cache.lease import Lease
from weft.cache.nodes import Node
from weft.cache.pools import PagePool, StatePool
from weft.cache.radix_tree import RadixTree


def check_accounts(pages: PagePool, slots: StatePool, tree: RadixTree, leases: Iterable[Lease]) -> None:
    """Assert the invariants of pools, tree and leases, each alone and together."""
    pages.check()
    slots.check()
    check_tree(tree)
    _check_pages(pages, tree, leases)
    _check_locks(tree, leases)
    _check_slots(slots, tree, leases)


def check_tree(tree: RadixTree) -> None:
    """Assert the shape of the tree: spans, pages per span, children's keys, checkpoints inside their spans, lock
    order."""
    checkpoints = []
    for node in tree.nodes():
        assert node.attached and (node.parent is not None) == (len(node.tokens) > 0), "an empty or detached node"
        spanned = -(-node.end // tree.page_size) - node.start // tree.page_size if len(node.tokens) else 0
        assert len(node.pages) == spanned, "a node does not list the pages of its span"
        assert sum(child.locks for child in node.children.values()) <= node.locks, "a lock must reach the root"
        for token, child in node.children.items():
            assert child.parent is node and child.start == node.end and int(child.tokens[0]) == token
        for position, checkpoint in node.checkpoints.items():
            assert node.start < position <= node.end, "a state outside its node"
            assert checkpoint.node is node and checkpoint.position == position and checkpoint.attached
            checkpoints.append(checkpoint)
    assert len(checkpoints) == tree.num_checkpoints, "checkpoints are miscounted"
    assert sum(c.pins > 0 for c in checkpoints) == tree.num_pinned_checkpoints, "pinned checkpoints are miscounted"


def _check_pages(pages: PagePool, tree: RadixTree, leases: Iterable[Lease]) -> None:
    references, pins = [0] * pages.num_pages, [0] * pages.num_pages
    for lease in leases:
        own, shared = lease.own_pages, lease.pages[: lease.num_shared_pages]
        assert len(lease.pages) == len(set(lease.pages)), "a lease lists a page twice"
        assert all(pages.pins(page) for page in shared), "a shared page could be evicted"
        for page in own:
            references[page] += 1
            pins[page] += 1
            assert references[page] == 1, "two leases own the same page"
    for node in tree.nodes():
        for page in node.pages:
            references[page] += 1
            pins[page] += node.locks > 0
    for page in range(1, pages.num_pages):
        assert references[page] == pages.references(page), f"page {page} has lost or gained a reference"
        assert pins[page] == pages.pins(page), f"page {page} has lost or gained a pin"


def _check_locks(tree: RadixTree, leases: Iterable[Lease]) -> None:
    locks: dict[Node, int] = {}
    for lease in leases:
        for node in lease.node.path() if lease.node is not None else ():
            locks[node] = locks.get(node, 0) + 1
    for node in tree.nodes():
        assert node.locks == locks.pop(node, 0), "a node's locks are not those of the leases below it"
    assert not locks, "a lease is locked on a node that is not in the tree"


def _check_slots(slots: StatePool, tree: RadixTree, leases: Iterable[Lease]) -> None:
    held = [checkpoint.slot for node in tree.nodes() for checkpoint in node.checkpoints.values()]
    for lease in leases:
        held += lease.checkpoints.slots() + lease.drafts.slots() + [lease.state_slot] * (lease.state_slot > 0)
    assert len(held) == len(set(held)), "a slot has two owners"
    assert len(held) + slots.num_free == slots.capacity, "slots leaked"
