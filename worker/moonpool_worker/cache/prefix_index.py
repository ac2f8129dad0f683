"""Which block holds which prefix in one tier, and which block may go first.

A node is one resident block, found by its link of the hash chain. A node may be evicted when nobody refers to it and
no resident node continues it: leaves first, so what stays is always a usable prefix. Among those the least recently
used goes first.

The candidates sit in a heap with *lazy* recency: touching a node only writes its tick; an entry that surfaces with an
old tick is pushed back with the new one, and one that is no candidate any more is dropped (it is pushed again when it
becomes one). So an eviction costs O(log n) amortised, and a touch O(1).
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Sequence


class Node:
    """One resident block. ``stored`` is L3's: the generation of the store that is believed to have it, 0 for none."""

    __slots__ = ("digest", "parent", "queued", "refs", "resident", "slot", "stored", "tick")

    def __init__(self, digest: bytes, parent: bytes | None, slot: int, tick: int) -> None:
        self.digest = digest
        self.parent = parent
        self.slot = slot
        self.tick = tick
        self.refs = 0
        self.stored = 0
        self.queued = False
        self.resident = True


class PrefixIndex:
    """Nodes of one tier by digest.

    ``on_release(node)`` is called once per node that has left the index and that nobody refers to: its slot is free
    from then on.
    """

    def __init__(self, on_release: Callable[[Node], None]) -> None:
        self._nodes: dict[bytes, Node] = {}
        self._children: dict[bytes, int] = {}
        self._heap: list[tuple[int, int, Node]] = []
        self._order = itertools.count()
        self._clock = 0
        self._unreferenced = 0
        self._on_release = on_release

    def __len__(self) -> int:
        return len(self._nodes)

    @property
    def unreferenced(self) -> int:
        """Nodes that only the index holds."""
        return self._unreferenced

    def get(self, digest: bytes) -> Node | None:
        return self._nodes.get(digest)

    def nodes(self) -> Iterable[Node]:
        return self._nodes.values()

    def match(self, chain: Sequence[bytes], start: int = 0, stop: int | None = None) -> list[Node]:
        """The resident nodes of ``chain[start:stop]``, up to the first that is missing. Changes nothing."""
        matched = []
        for position in range(start, len(chain) if stop is None else min(stop, len(chain))):
            node = self._nodes.get(chain[position])
            if node is None:
                break
            matched.append(node)
        return matched

    def touch(self, nodes: Iterable[Node]) -> None:
        """The nodes were used now, all at the same time."""
        self._clock += 1
        for node in nodes:
            node.tick = self._clock

    def insert(self, digest: bytes, parent: bytes | None, slot: int, refs: int = 0) -> Node:
        """Add a block. KeyError when the digest is resident already: deduplicate before."""
        if digest in self._nodes:
            raise KeyError(f"block {digest.hex()} is resident already")
        self._clock += 1
        node = Node(digest, parent, slot, self._clock)
        node.refs = refs
        self._nodes[digest] = node
        if parent is not None:
            self._children[parent] = self._children.get(parent, 0) + 1
        if not refs:
            self._unreferenced += 1
            self._enqueue(node)
        return node

    def ref(self, node: Node) -> None:
        if node.refs == 0 and node.resident:
            self._unreferenced -= 1
        node.refs += 1

    def unref(self, node: Node) -> None:
        if node.refs <= 0:
            raise RuntimeError(f"block {node.digest.hex()} is released more often than it was taken")
        node.refs -= 1
        if node.refs:
            return
        if node.resident:
            self._unreferenced += 1
            self._enqueue(node)
        else:
            self._on_release(node)

    def remove(self, node: Node) -> None:
        """Take the node out of the index; its slot is free when the last reference goes."""
        if not node.resident:
            return
        node.resident = False
        del self._nodes[node.digest]
        if node.parent is not None:
            self._forget_child(node.parent)
        if node.refs == 0:
            self._unreferenced -= 1
            self._on_release(node)

    def victim(self) -> Node | None:
        """The least recently used leaf that nobody refers to, or None. It stays until ``remove``."""
        while self._heap:
            tick, _, node = self._heap[0]
            if not self._is_candidate(node):
                heapq.heappop(self._heap)
                node.queued = False
            elif tick < node.tick:
                heapq.heapreplace(self._heap, (node.tick, next(self._order), node))
            else:
                return node
        return None

    def clear(self) -> int:
        """Remove every node that nobody refers to; returns how many."""
        idle = [node for node in self._nodes.values() if node.refs == 0]
        for node in idle:
            self.remove(node)
        return len(idle)

    def _is_candidate(self, node: Node) -> bool:
        return node.resident and node.refs == 0 and not self._children.get(node.digest)

    def _enqueue(self, node: Node) -> None:
        if not node.queued and self._is_candidate(node):
            node.queued = True
            heapq.heappush(self._heap, (node.tick, next(self._order), node))

    def _forget_child(self, parent: bytes) -> None:
        left = self._children[parent] - 1
        if left:
            self._children[parent] = left
            return
        del self._children[parent]
        node = self._nodes.get(parent)
        if node is not None:
            self._enqueue(node)
