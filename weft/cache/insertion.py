"""Insertion of a request's KV and states into the prefix tree.

The lease keeps its lock on all that it still reads.
"""

import itertools

from weft.cache.lease import Lease
from weft.cache.nodes import Node, Tokens
from weft.cache.policy import ReuseOdds
from weft.cache.pools import StatePool
from weft.cache.radix_tree import RadixTree


def insert(
    lease: Lease, tokens: Tokens, tree: RadixTree, slots: StatePool, odds: ReuseOdds, *, ends: bool = False
) -> None:
    """Insert the KV of ``tokens``, the first ones of the lease, and the states stored up to their end.

    If the tree has a state already, the slot of the lease is freed.

    Args:
        ends: the lease ends next, so what is inserted need not be locked.
    """
    assert lease.node is not None
    if len(tokens) > lease.node.end:
        deepest = tree.extend(lease.node, tokens, lease.pages)
        if not ends:
            _lock_own(lease, deepest, tree)
    states = lease.checkpoints
    for position, slot in states.take_stored(len(tokens)):
        at, kind = tree.locate(lease.node, tokens, position), states.kinds.get(position, "inside")
        if at is not None and tree.add_checkpoint(at, position, slot, kind, states.lineage):
            odds.add(kind, states.lineage, 0)
        else:
            slots.release(slot)


def move_lock(lease: Lease, node: Node, tree: RadixTree) -> None:
    """Lock the path of ``node``, and unlock the path that was locked before."""
    assert lease.node is not None
    tree.lock(node)
    tree.unlock(lease.node)
    lease.node = node


def _lock_own(lease: Lease, deepest: Node, tree: RadixTree) -> None:
    """Move the lock down the path to ``deepest`` while the nodes list pages of the lease.

    The lease does not read pages of the tree that another request computed, so they stay evictable.
    """
    node = lease.node
    below = list(itertools.takewhile(lambda each: each is not node, deepest.path()))
    for each in reversed(below):
        first = each.start // tree.page_size
        if each.pages != lease.pages[first : first + len(each.pages)]:
            break
        node = each
    if node is not None and node is not lease.node:
        move_lock(lease, node, tree)
