"""Keys of KV pages and states: chained digests of token ids.

The key of a page covers every token up to the page's end, the salt, and a fingerprint of everything that decides what
the bytes mean. Equal keys therefore mean equal content. Token ids include images (``weft/multimodal/items.py``).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from weft.cache.nodes import Node, Tokens

KEY_BYTES = 16

KEYS_AHEAD = 64
"""Keys that are computed at a time. A lookup asks for one after the other."""

MAX_REMEMBERED = 128
"""Upper bound on sequences whose keys are remembered between lookups."""


def root_key(fingerprint: str, salt: str | None) -> bytes:
    """The key of the empty prefix."""
    text = f"{fingerprint}\n" if salt is None else f"{fingerprint}\nsalt {salt}"
    return blake2b(text.encode(), digest_size=KEY_BYTES, person=b"weft root").digest()


_PAGE = blake2b(digest_size=KEY_BYTES, person=b"weft page")


def page_keys(before: bytes, tokens: bytes | memoryview, page_bytes: int) -> list[bytes]:
    """The key of each page. ``before`` is the key of the pages before them, ``tokens`` their ids as int64."""
    keys, key = [], before
    for begin in range(0, len(tokens), page_bytes):
        digest = _PAGE.copy()  # quicker than a new one
        digest.update(key + tokens[begin : begin + page_bytes])
        key = digest.digest()
        keys.append(key)
    return keys


def state_key(before: bytes, tail: bytes) -> bytes:
    """The key of a state after the whole pages of ``before`` and the tokens ``tail``."""
    return blake2b(before + tail, digest_size=KEY_BYTES, person=b"weft state").digest()


def as_bytes(tokens: Tokens) -> bytes:
    """Token ids as they are hashed."""
    return tokens.astype("<i8").tobytes()


class PageKeys:
    """The keys of whole pages of tree nodes and of looked-up sequences."""

    def __init__(self, fingerprint: str, page_size: int) -> None:
        self._fingerprint, self._page_size = fingerprint, page_size
        self._sequences: OrderedDict[int, SequenceKeys] = OrderedDict()

    def root(self, salt: str | None) -> bytes:
        return root_key(self._fingerprint, salt)

    def of_node(self, node: Node) -> list[bytes]:
        """Keys after each whole page that ends inside the node's span, in order. They are stored in the node."""
        missing = []
        each: Node | None = node
        while each is not None and each.parent is not None and not self._is_known(each):
            missing.append(each)
            each = each.parent
        for each in reversed(missing):
            each.page_keys = self._compute(each)
        return node.page_keys

    def _is_known(self, node: Node) -> bool:
        return len(node.page_keys) == node.end // self._page_size - node.start // self._page_size

    def _compute(self, node: Node) -> list[bytes]:
        size = self._page_size
        first = node.start // size * size
        data = as_bytes(path_tokens(node, first, node.end // size * size))
        return page_keys(self.before(node, node.start), data, 8 * size)

    def before(self, node: Node, position: int) -> bytes:
        """The key of all whole pages of ``node``'s path up to ``position``, which is not beyond its end."""
        size, at = self._page_size, position // self._page_size
        while node.parent is not None and node.start // size >= at:
            node = node.parent
        if node.parent is None:
            return self.root(node.salt)
        return self.of_node(node)[at - node.start // size - 1]

    def of_state(self, node: Node, position: int) -> tuple[bytes, bytes]:
        """The key of the whole pages before ``position`` on the path of ``node``, and that of the state there."""
        before = self.before(node, position)
        tail = path_tokens(node, position // self._page_size * self._page_size, position)
        return before, state_key(before, as_bytes(tail))

    def of_sequence(self, tokens: Tokens, salt: str | None, node: Node | None, first: int) -> SequenceKeys:
        """Keys of a sequence from page ``first`` on. The path of ``node`` holds its first ``first`` pages. The keys
        are remembered while the caller keeps asking with the same array."""
        known = self._sequences.get(id(tokens))
        if known is not None and known.tokens is tokens and known.salt == salt and known.first <= first:
            self._sequences.move_to_end(id(tokens))
            return known
        start = self.root(salt) if node is None else self.before(node, first * self._page_size)
        made = SequenceKeys(tokens, salt, first, start, self._page_size)
        self._sequences[id(tokens)] = made
        if len(self._sequences) > MAX_REMEMBERED:
            self._sequences.popitem(last=False)
        return made


class SequenceKeys:
    """The keys of one sequence, computed as far as somebody asks."""

    def __init__(self, tokens: Tokens, salt: str | None, first: int, start: bytes, page_size: int) -> None:
        self.tokens, self.salt, self.first, self._page_size = tokens, salt, first, page_size
        self._keys = [start]
        ids = np.ascontiguousarray(tokens, dtype="<i8")  # int64 tokens are not copied
        self._bytes = ids.data.cast("B") if len(ids) else memoryview(b"")

    def __getitem__(self, count: int) -> bytes:
        """The key of the first ``count`` pages."""
        if count > self.num_known:
            self.extend(count)
        return self._keys[count - self.first]

    def after(self, count: int) -> Iterator[bytes]:
        """The keys of more pages than ``count``, in order."""
        while count < self.num_pages:
            if count >= self.num_known:
                self.extend(min(count + KEYS_AHEAD, self.num_pages))
            known = self._keys[count + 1 - self.first :]
            yield from known
            count += len(known)

    @property
    def num_pages(self) -> int:
        """Number of whole pages of the sequence."""
        return len(self.tokens) // self._page_size

    @property
    def num_known(self) -> int:
        """Number of pages up to which keys are computed."""
        return self.first + len(self._keys) - 1

    def extend(self, count: int) -> None:
        """Compute the keys up to ``count`` pages."""
        assert count <= self.num_pages, "the sequence has fewer pages"
        size = 8 * self._page_size
        self._keys += page_keys(self._keys[-1], self._bytes[self.num_known * size : count * size], size)

    def state(self, count: int, tail: int) -> bytes:
        """The key of the state after ``count`` pages and ``tail`` tokens."""
        begin = count * self._page_size
        return state_key(self[count], as_bytes(self.tokens[begin : begin + tail]))


def path_tokens(node: Node, start: int, end: int) -> NDArray[np.int64]:
    """Tokens ``start`` to ``end`` of the path of ``node``, as int64."""
    parts: list[NDArray[np.int64]] = []
    each: Node | None = node
    while each is not None and each.end > start:
        parts.append(each.tokens[max(0, start - each.start) : max(0, end - each.start)].astype(np.int64))
        each = each.parent
    return np.concatenate(parts[::-1]) if parts else np.zeros(0, dtype=np.int64)
