"""Links of pages that were let go, with how often they had been hit: one that comes back was missed."""

from __future__ import annotations

from collections import OrderedDict


class Ghosts:
    """The last ``limit`` links that were remembered. (The ghost queue of S3-FIFO, Yang et al., 2023.)"""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._hits: OrderedDict[bytes, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._hits)

    def remember(self, digest: bytes, hits: int) -> None:
        self._hits.pop(digest, None)
        self._hits[digest] = hits
        if len(self._hits) > self._limit:
            self._hits.popitem(last=False)

    def recall(self, digest: bytes) -> int | None:
        """How often it had been hit, None for one that is not remembered; it is forgotten then."""
        return self._hits.pop(digest, None)
