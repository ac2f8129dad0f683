"""The free blocks of one group in parents that it shares with nobody, by how full their parents are."""

from __future__ import annotations

from collections.abc import Callable, Sequence


class FreeBlocks:
    """Free blocks of parents that have other blocks in use; ``packing`` blocks are in a parent.

    The fullest parents are used first, so that the others empty and can go to another group. All operations cost
    O(packing) at most, independent of the number of parents.
    """

    def __init__(self, packing: int) -> None:
        self._packing = packing
        self._by_parent: dict[int, dict[int, None]] = {}
        self._by_room: list[dict[int, None]] = [{} for _ in range(packing + 1)]
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def take(self, count: int, after: int | None, parent_of: Callable[[int], int]) -> list[int]:
        """Up to ``count`` blocks: those that follow ``after`` first, then those of the fullest parents."""
        taken: list[int] = []
        while after is not None and len(taken) < count:
            after += 1
            parent = parent_of(after)
            if after not in self._by_parent.get(parent, ()):
                break
            self._remove(parent, after)
            taken.append(after)
        for room in range(1, self._packing):
            while len(taken) < count and self._by_room[room]:
                parent, _ = self._by_room[room].popitem()
                blocks = sorted(self._by_parent.pop(parent))
                used = min(room, count - len(taken))
                taken += blocks[:used]
                self._count -= room
                self.add(parent, blocks[used:])
        return taken

    def add(self, parent: int, blocks: Sequence[int]) -> None:
        """A parent begins to be used; these blocks of it are left."""
        if blocks:
            self._by_parent[parent] = dict.fromkeys(blocks)
            self._by_room[len(blocks)][parent] = None
            self._count += len(blocks)

    def put(self, parent: int, block: int) -> bool:
        """A block comes back; True when its parent is empty now, and no longer known here."""
        blocks = self._by_parent.setdefault(parent, {})
        room = len(blocks)
        if room:
            del self._by_room[room][parent]
        if room + 1 == self._packing:
            del self._by_parent[parent]
            self._count -= room
            return True
        blocks[block] = None
        self._by_room[room + 1][parent] = None
        self._count += 1
        return False

    def _remove(self, parent: int, block: int) -> None:
        blocks = self._by_parent[parent]
        del self._by_room[len(blocks)][parent]
        del blocks[block]
        self._count -= 1
        if blocks:
            self._by_room[len(blocks)][parent] = None
        else:
            del self._by_parent[parent]
