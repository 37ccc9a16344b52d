"""Prefixes of token sequences as numbers: how a router knows what a replica has cached.

Job: hash all prefixes of a prompt, and those that a tree can reuse. Owns: the hash. Does not know: replicas.

The hash of ``n`` tokens is ``seed + sum (token_i + 1) * B**i`` modulo 2**64: every prefix of a prompt in one pass, and
a tree's nodes from their parents'. It is a hint, not a proof: a collision costs a worse choice of replica.
"""

from __future__ import annotations

import zlib

import numpy as np
from numpy.typing import NDArray

from weft.cache.radix_tree import Node, RadixTree, Tokens, as_tokens

STEP = 64
"""Tokens between the prefixes that are told of a model without recurrent layers, which can reuse any."""

MAX_TOLD = 8192
"""Prefixes that one replica tells; the ones used latest."""

_BASE = 0x9E3779B97F4A7C15
_powers = np.ones(1, dtype=np.uint64)


def prefix_hashes(token_ids: list[int] | Tokens, salt: str | None = None) -> NDArray[np.uint64]:
    """``hashes[n - 1]`` is that of the first ``n`` tokens."""
    return _extend(_seed(salt), 0, as_tokens(token_ids))


def reusable_prefixes(tree: RadixTree, *, needs_state: bool) -> list[int]:
    """Hashes of the prefixes in ``tree`` that a request could start from.

    Args:
        needs_state: only those for which a recurrent state is kept.
    """
    found: list[tuple[int, int]] = []
    stack: list[tuple[Node, int]] = [(root, _seed(root.salt)) for root in tree.roots]
    while stack:
        node, before = stack.pop()
        hashes = _extend(before, node.start, node.tokens)
        if needs_state:
            found += [(c.last_used, int(hashes[p - node.start - 1])) for p, c in node.checkpoints.items()]
        elif len(node.tokens):
            positions = {*range(-(-(node.start + 1) // STEP) * STEP, node.end, STEP), node.end}
            found += [(node.last_used, int(hashes[p - node.start - 1])) for p in positions]
        end = int(hashes[-1]) if len(hashes) else before
        stack += [(child, end) for child in node.children.values()]
    found.sort(reverse=True)
    return [value for _, value in found[:MAX_TOLD]]


def _seed(salt: str | None) -> int:
    return 0 if salt is None else zlib.crc32(salt.encode()) + 1


def _extend(before: int, start: int, tokens: Tokens) -> NDArray[np.uint64]:
    """Hashes of the prefixes that end within ``tokens``, which follow ``start`` tokens with hash ``before``."""
    global _powers
    if len(_powers) < start + len(tokens):
        count = max(4096, 2 * (start + len(tokens)))
        factors = np.full(count, _BASE, dtype=np.uint64)
        factors[0] = 1
        _powers = np.multiply.accumulate(factors)
    terms = (tokens.astype(np.uint64) + np.uint64(1)) * _powers[start : start + len(tokens)]
    return np.add.accumulate(terms) + np.uint64(before)
