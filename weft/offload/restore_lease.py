"""The lease of a restore: the pages and the slot that a prefix from below will fill."""

from msgspec.structs import replace

from weft.cache.lease import Lease, LeaseCheckpoints
from weft.cache.manager import Manager
from weft.cache.match import Match, explain
from weft.cache.nodes import Prefix
from weft.cache.tier import Below


def begin_lease(manager: Manager, match: Match, below: Below, num_tokens: int, num_running: int) -> Lease | None:
    """Lock the part of the prefix that the device has, and take a slot. None if the request would not fit.

    Args:
        num_tokens: of the request.
        num_running: running requests, each of which may need one more page.
    """
    spec, shared = manager.spec, below.num_shared_tokens
    node = match.prefix.node
    while node is not None and node.parent is not None and node.start >= shared:
        node = node.parent
    part = replace(match, prefix=Prefix(node, shared), num_tokens=min(shared, match.num_tokens))
    locked = manager.lock_prefix(part)
    assert locked is not None, "a tier without a prefix cache"
    needed = spec.pages_for(num_tokens) - shared // spec.page_size + num_running
    has_room = needed <= manager.pages.num_free + manager.pages.num_evictable
    slot = manager.evictor.take_slot() if has_room and below.state is not None else 0
    if not has_room or slot is None:
        manager.tree.unlock(locked)
        return None
    num_shared_pages = shared // spec.page_size
    lease = Lease(
        tokens=match.tokens[: below.num_tokens],
        salt=match.salt,
        num_prompt_tokens=below.num_tokens,
        report=explain(match, needs_state=below.state is not None),
        num_cached_tokens=0,
        write_start=shared,
        page_copy=None,
        state_fork=None,
        fork_source=None,
        pages=manager.tree.page_list(Prefix(locked, shared))[:num_shared_pages],
        num_shared_pages=num_shared_pages,
        node=locked,
        state_slot=0,
        checkpoints=LeaseCheckpoints(
            kinds={below.num_tokens: below.kind},
            stored=[(below.num_tokens, slot)] if below.state is not None else [],
        ),
        num_committed_tokens=0,
    )
    manager.hold(lease)
    return lease
