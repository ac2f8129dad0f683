"""Which entries one group has in one tier, and which of them may go first.

A node is one resident page of a group, found by its link of the hash chain. It may go when nobody refers to it and, in
a *closed* group, when no resident node continues it: leaves first, so what stays is always a usable prefix. Among the
candidates the one with the least *value* goes first. A value is when the node was used last, on a clock that counts
the pages that came into the tier, and a *reward* on top for each time it was hit (up to a few): a page that was reused
once stays until so many more pages have come than one that never was. A page that was let go and is wanted again counts
as reused, too: the index remembers more links than it has pages. This is LRU with virtual recency; as the values of all
pages age together, yesterday's favourite goes too.

Values only rise, so the candidates sit in a heap that is lazy: an entry that surfaces with an old value is pushed back
with the new one, and one that is no candidate any more is dropped (it is pushed again when it becomes one). An
eviction costs O(log n) amortised, a touch O(1).
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from moonpool_worker.cache.ghosts import Ghosts

#: So many entries of nodes that are gone do not matter.
_STALE = 64

_serial = itertools.count()


class Node:
    """One resident page of a group. ``slot`` is its place in L2, ``blocks`` its blocks in L1; ``depth`` is the page's
    number in its text. ``stored`` is L3's: the generation of the store that is believed to have it, 0 for none;
    ``checked``: this process wrote the bytes or has compared their checksum."""

    __slots__ = (
        "blocks",
        "checked",
        "depth",
        "digest",
        "group",
        "hits",
        "parent",
        "queued",
        "refs",
        "resident",
        "serial",
        "slot",
        "stored",
        "tick",
    )

    def __init__(
        self, group: int, digest: bytes, parent: bytes | None, depth: int, blocks: tuple[int, ...], tick: int
    ) -> None:
        self.group = group
        self.digest = digest
        self.parent = parent
        self.depth = depth
        self.blocks = blocks
        self.slot = blocks[0]
        self.tick = tick
        self.hits = 0
        self.refs = 0
        self.stored = 0
        self.checked = True
        self.queued = False
        self.resident = True
        self.serial = next(_serial)


@dataclass(slots=True)
class Clock:
    """One per tier, so that the values of its groups compare. ``reward``: ticks that a hit is worth, ``most`` hits at
    most; ``memory``: links of pages that were let go, which each index remembers."""

    now: int = 0
    reward: int = 0
    most: int = 1
    memory: int = 0

    def value(self, node: Node) -> int:
        return node.tick + self.reward * min(node.hits, self.most)


class PrefixIndex:
    """The nodes of one group by link.

    ``on_release(node)`` is called once per node that has left the index and that nobody refers to: its place is free
    from then on.
    """

    def __init__(
        self, on_release: Callable[[Node], None], group: int = 0, closed: bool = True, clock: Clock | None = None
    ) -> None:
        self.group = group
        self.closed = closed
        self.clock = clock or Clock()
        self._nodes: dict[bytes, Node] = {}
        self._children: dict[bytes, set[Node]] = {}
        self._heap: list[tuple[int, int, int, Node]] = []
        self._ghosts = Ghosts(self.clock.memory)
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
        self.clock.now += 1
        now = self.clock.now
        for node in nodes:
            node.tick = now

    def insert(
        self, digest: bytes, parent: bytes | None, blocks: tuple[int, ...], depth: int = 0, refs: int = 0
    ) -> Node:
        """Add a page. KeyError when the link is resident already: deduplicate before."""
        if digest in self._nodes:
            raise KeyError(f"block {digest.hex()} is resident already")
        self.clock.now += 1
        node = Node(self.group, digest, parent, depth, blocks, self.clock.now)
        node.refs = refs
        before = self._ghosts.recall(digest)
        if before is not None:
            node.hits = before + 1
        self._nodes[digest] = node
        if parent is not None and self.closed:
            self._children.setdefault(parent, set()).add(node)
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
        """Take the node out of the index; its place is free when the last reference goes."""
        if not node.resident:
            return
        node.resident = False
        del self._nodes[node.digest]
        if node.parent is not None and self.closed:
            self._forget_child(node.parent, node)
        if node.refs == 0:
            self._unreferenced -= 1
            self._on_release(node)

    def forget(self, node: Node) -> None:
        """As :meth:`remove`, for want of room: when the page comes back, that is a reuse."""
        self._ghosts.remember(node.digest, node.hits)
        self.remove(node)

    def victim(self) -> Node | None:
        """The candidate of least value, or None. It stays until ``remove``."""
        heap, value = self._heap, self.clock.value
        while heap:
            queued_value, _, _, node = heap[0]
            if not self._is_candidate(node):
                heapq.heappop(heap)
                node.queued = False
            elif queued_value < value(node):
                heapq.heapreplace(heap, self._entry(node))
            else:
                return node
        return None

    def with_continuations(self, node: Node) -> Iterator[Node]:
        """The node and all resident nodes that continue it, each before what it continues."""
        found = [node]
        for each in found:
            found.extend(self._children.get(each.digest, ()))
        return reversed(found)

    def clear(self) -> list[Node]:
        """Remove every node that nobody refers to; returns them."""
        idle = [node for node in self._nodes.values() if node.refs == 0]
        for node in idle:
            self.remove(node)
        return idle

    def _is_candidate(self, node: Node) -> bool:
        return node.resident and node.refs == 0 and not self._children.get(node.digest)

    def _enqueue(self, node: Node) -> None:
        if not node.queued and self._is_candidate(node):
            node.queued = True
            heapq.heappush(self._heap, self._entry(node))
            if len(self._heap) > 2 * len(self._nodes) + _STALE:
                self._sweep()

    def _sweep(self) -> None:
        """Drop entries of nodes that left by another way than :meth:`victim`, else they would pile up."""
        kept = []
        for entry in self._heap:
            node = entry[-1]
            node.queued = self._is_candidate(node)
            if node.queued:
                kept.append(entry)
        heapq.heapify(kept)
        self._heap = kept

    def _entry(self, node: Node) -> tuple[int, int, int, Node]:
        # Of one text's pages the last goes first; a window's or a state's early ones are passed by, so they go first.
        order = -node.depth if self.closed else node.depth
        return (self.clock.value(node), order, node.serial, node)

    def _forget_child(self, parent: bytes, child: Node) -> None:
        children = self._children[parent]
        children.discard(child)
        if children:
            return
        del self._children[parent]
        node = self._nodes.get(parent)
        if node is not None:
            self._enqueue(node)
