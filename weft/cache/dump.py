"""The prefix tree as text for people: one line per node, indented by depth."""

from collections.abc import Iterable

from weft.cache.nodes import Node
from weft.cache.radix_tree import RadixTree

MAX_NODES = 1000


def dump_tree(tree: RadixTree) -> str:
    """Format the tree: spans, pages, leases, states (evicted ones as tombstones) and admissions since the last use.

    ::

        root
          [0, 150) 10 pages, 2 leases, states 150, used 1 admissions ago
            [150, 211) 5 pages, lost states 210, used 3 admissions ago
    """
    lines: list[str] = []
    stack = [(root, 0) for root in sorted(tree.roots, key=lambda root: root.salt or "", reverse=True)]
    while stack and len(lines) < MAX_NODES:
        node, depth = stack.pop()
        lines.append("  " * depth + _describe(node, tree.clock))
        stack.extend((child, depth + 1) for child in reversed(node.children.values()))
    if stack:
        lines.append(f"(only {MAX_NODES} nodes are shown)")
    return "\n".join(lines) if lines else "the cache is empty"


def _describe(node: Node, clock: int) -> str:
    if node.parent is None:
        return "root" if node.salt is None else f"root of salt {node.salt!r}"
    parts = [f"[{node.start}, {node.end}) {len(node.pages)} pages"]
    if node.locks:
        parts.append(f"{node.locks} leases")
    if node.checkpoints:
        parts.append(f"states {_positions(node.checkpoints)}")
    if node.lost_states:
        parts.append(f"lost states {_positions(node.lost_states)}")
    return ", ".join([*parts, f"used {clock - node.last_used} admissions ago"])


def _positions(states: Iterable[int]) -> str:
    return " ".join(map(str, sorted(states)))
