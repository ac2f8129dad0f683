"""Blocks that the store lately did not have, so that a popular miss is not asked for by every request."""

from __future__ import annotations

from collections import OrderedDict

#: A cache group, and a link of the hash chain.
Name = tuple[int, bytes]


class NegativeCache:
    """At most ``capacity`` names, each for ``ttl`` seconds; the oldest leaves first."""

    def __init__(self, capacity: int = 8192, ttl: float = 2.0) -> None:
        self._capacity = capacity
        self._ttl = ttl
        self._until: OrderedDict[Name, float] = OrderedDict()

    def add(self, name: Name, now: float) -> None:
        self._until[name] = now + self._ttl
        self._until.move_to_end(name)
        if len(self._until) > self._capacity:
            self._until.popitem(last=False)

    def contains(self, name: Name, now: float) -> bool:
        until = self._until.get(name)
        if until is None:
            return False
        if now >= until:
            del self._until[name]
            return False
        return True

    def discard(self, name: Name) -> None:
        self._until.pop(name, None)

    def clear(self) -> None:
        self._until.clear()
