"""Blocks that the store lately did not have, so that a popular miss is not asked for by every request."""

from __future__ import annotations

from collections import OrderedDict


class NegativeCache:
    """At most ``capacity`` digests, each for ``ttl`` seconds; the oldest leaves first."""

    def __init__(self, capacity: int = 4096, ttl: float = 2.0) -> None:
        self._capacity = capacity
        self._ttl = ttl
        self._until: OrderedDict[bytes, float] = OrderedDict()

    def add(self, digest: bytes, now: float) -> None:
        self._until[digest] = now + self._ttl
        self._until.move_to_end(digest)
        if len(self._until) > self._capacity:
            self._until.popitem(last=False)

    def contains(self, digest: bytes, now: float) -> bool:
        until = self._until.get(digest)
        if until is None:
            return False
        if now >= until:
            del self._until[digest]
            return False
        return True

    def discard(self, digest: bytes) -> None:
        self._until.pop(digest, None)

    def clear(self) -> None:
        self._until.clear()
