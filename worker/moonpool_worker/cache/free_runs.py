"""Free ids, handed out in runs of consecutive ids where possible.

Attention over consecutive blocks reads the arena without a copy, so a request should get neighbours, and room to grow
behind them. Free ids are kept as maximal runs, found by either end and bucketed by the power of two of their length:
every operation costs O(runs it touches), independent of the number of blocks.
"""

from __future__ import annotations

from collections.abc import Iterable

#: A run this many times longer than what is asked for is split in its middle, which leaves the owner before it room.
_ROOMY = 4


class FreeRuns:
    """The free ids among ``[first, first + count)``; all of them at the start."""

    def __init__(self, first: int, count: int) -> None:
        self._length: dict[int, int] = {}  # start of a run → its length
        self._start: dict[int, int] = {}  # last id of a run → its start
        self._buckets: list[dict[int, None]] = [{} for _ in range(max(count, 1).bit_length() + 1)]
        self._first = first
        self._end = first + count
        self._free = count
        if count:
            self._add(first, count)

    def __len__(self) -> int:
        return self._free

    def take(self, count: int, after: int | None = None) -> list[int]:
        """``count`` ids, following ``after`` if those are free, else in as few runs as is easy.

        ValueError, and nothing taken, when fewer are free.
        """
        if count > self._free:
            raise ValueError(f"{count} ids wanted, {self._free} are free")
        taken: list[int] = []
        if count and after is not None and after + 1 in self._length:
            taken += self._cut(after + 1, after + 1, min(count, self._length[after + 1]))
        while len(taken) < count:
            missing = count - len(taken)
            start = self._choose(missing)
            length = self._length[start]
            at = start
            if length >= _ROOMY * missing and start != self._first:
                at = start + (length - missing) // 2
            taken += self._cut(start, at, min(missing, length))
        return taken

    def give(self, ids: Iterable[int]) -> None:
        """Take back ids that were taken. ValueError for an id out of range."""
        for one in ids:
            if not self._first <= one < self._end:
                raise ValueError(f"{one} is not among the ids {self._first}..{self._end - 1}")
            start, length = one, 1
            if one + 1 in self._length:
                length += self._remove(one + 1)
            if one - 1 in self._start:
                start = self._start[one - 1]
                length += self._remove(start)
            self._add(start, length)
            self._free += 1

    def _choose(self, count: int) -> int:
        # The longest bucket keeps what is already there together and gives most room to grow; any run in it will do.
        for bucket in reversed(self._buckets):
            if bucket:
                return next(iter(bucket))
        raise AssertionError(f"no free run though {self._free} ids are free ({count} wanted)")

    def _cut(self, start: int, at: int, count: int) -> list[int]:
        length = self._remove(start)
        if at > start:
            self._add(start, at - start)
        behind = start + length - (at + count)
        if behind:
            self._add(at + count, behind)
        self._free -= count
        return list(range(at, at + count))

    def _add(self, start: int, length: int) -> None:
        self._length[start] = length
        self._start[start + length - 1] = start
        self._buckets[length.bit_length()][start] = None

    def _remove(self, start: int) -> int:
        length = self._length.pop(start)
        del self._start[start + length - 1]
        del self._buckets[length.bit_length()][start]
        return length
