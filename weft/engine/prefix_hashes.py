"""Hashes of token prefixes, by which the router knows what a replica has cached.

Prefixes are reported and looked up in multiples of ``STEP`` tokens: a reusable position counts up to the last multiple
before it. The hash of ``n`` tokens is ``seed + sum (token_i + 1) * B**i`` modulo 2**64. One pass computes all prefixes
of a prompt, and a node's hashes follow from its parent's. The hash is a hint, not a proof. A collision, or a prompt
that diverges between two multiples, only leads to a worse choice of replica.

Hashing takes most of a router's time, so it goes chunk by chunk and stops when no replica knows more. With recurrent
states a request can start from few prefixes only. A tree that continues beyond the end of a chunk is then reported as
the hash up to there with other bits (``passing``).
"""

import zlib
from array import array
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from weft.cache.nodes import Node, Tokens
from weft.cache.radix_tree import RadixTree

STEP = 64

CHUNK = 1024
"""Number of tokens that are hashed at a time."""

MAX_REPORTED = 8192
"""Upper bound on the prefixes that one replica reports, the most recently used ones."""

_BASE = 0x9E3779B97F4A7C15
_PASSING = 0x5555555555555555
_powers = np.ones(1, dtype=np.uint64)


def chunks_of_hashes(token_ids: Sequence[int], salt: str | None = None) -> Iterator[list[int]]:
    """Yield the hashes of the first ``STEP``, ``2 * STEP``, … tokens, in lists for ``CHUNK`` tokens, computed on
    demand. Only ids of images are negative."""
    before = _seed(salt)
    for start in range(0, len(token_ids) // STEP * STEP, CHUNK):
        chunk = token_ids[start : start + CHUNK]
        tokens: NDArray[Any]
        try:
            tokens = np.frombuffer(array("I", chunk), dtype=np.uint32)
        except OverflowError:
            tokens = np.frombuffer(array("q", chunk), dtype=np.int64)
        sums = _terms(start, tokens[: len(chunk) // STEP * STEP]).reshape(-1, STEP).sum(axis=1)
        hashes: list[int] = (np.add.accumulate(sums) + np.uint64(before)).tolist()
        yield hashes
        before = hashes[-1]


def passing(value: int) -> int:
    """The mark of a tree that continues beyond the end of a chunk with hash ``value``, where no request can start."""
    return value ^ _PASSING


class Listener(Protocol):
    """Told of every reported hash: its node, its position, and whether a request could start there."""

    def __call__(self, value: int, node: Node, position: int, *, is_start: bool) -> None: ...


def reusable_prefixes(tree: RadixTree, *, needs_state: bool, listener: Listener | None = None) -> list[int]:
    """Hashes of the prefixes in ``tree`` from which a request could start, and of the chunks on the way, most recently
    used first.

    Args:
        needs_state: include only prefixes with a stored recurrent state.
    """
    found: dict[int, int] = {}  # hash -> time of last use
    stack = [(root, _seed(root.salt), _seed(root.salt)) for root in tree.roots]
    while stack:
        node, before, at_step = stack.pop()  # hashes of all tokens before the node, and up to the last multiple
        hashes = np.add.accumulate(_terms(node.start, node.tokens)) + np.uint64(before)
        for position, last_used in _positions(node, needs_state):
            inside = position // STEP * STEP - node.start
            value = int(hashes[inside - 1]) if inside > 0 else at_step
            found[value] = max(last_used, found.get(value, 0))
            if listener is not None:
                listener(value, node, position, is_start=True)
        for position in range(node.start // CHUNK * CHUNK + CHUNK, node.end + 1, CHUNK) if needs_state else ():
            mark = passing(int(hashes[position - node.start - 1]))
            found[mark] = node.last_used
            if listener is not None:
                listener(mark, node, position, is_start=False)
        last = node.end // STEP * STEP - node.start
        at_end = int(hashes[-1]) if len(hashes) else before
        stack += [(c, at_end, int(hashes[last - 1]) if last > 0 else at_step) for c in node.children.values()]
    return sorted(found, key=found.__getitem__, reverse=True)[:MAX_REPORTED]


def _positions(node: Node, needs_state: bool) -> list[tuple[int, int]]:
    """Positions from which a request could start in this node, each with its time of last use. Without states these
    are multiples of ``STEP``."""
    if needs_state:
        return [(p, c.last_used) for p, c in node.checkpoints.items() if p >= STEP]
    return [(p, node.last_used) for p in range((node.start // STEP + 1) * STEP, node.end + 1, STEP)]


def _seed(salt: str | None) -> int:
    return 0 if salt is None else zlib.crc32(salt.encode()) + 1


def _terms(start: int, tokens: Tokens | NDArray[np.uint32]) -> NDArray[np.uint64]:
    """The terms that tokens add to a hash. The first token is at position ``start``."""
    global _powers
    if len(_powers) < start + len(tokens):
        factors = np.full(max(4096, 2 * (start + len(tokens))), _BASE, dtype=np.uint64)
        factors[0] = 1
        _powers = np.multiply.accumulate(factors)
    terms = tokens.astype(np.uint64)
    terms += np.uint64(1)
    terms *= _powers[start : start + len(tokens)]
    return terms
