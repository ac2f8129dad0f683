"""What a request holds of the cache, and what a look at the cache found."""

from __future__ import annotations

from dataclasses import dataclass, field

from moonpool_worker.cache.prefix_index import Node
from moonpool_worker.cache.stats import TierTokens


@dataclass(frozen=True, slots=True)
class Probe:
    """Contiguous leading blocks of a chain: the first ``l1`` in L1, then ``l2`` more in L2. L3 is not asked."""

    l1: int
    l2: int
    granularity: int

    @property
    def blocks(self) -> int:
        return self.l1 + self.l2

    @property
    def tokens(self) -> int:
        return self.blocks * self.granularity


@dataclass(slots=True)
class Allocation:
    """Blocks of one request: entry ``i`` of ``block_ids`` holds positions ``i * P`` to ``(i + 1) * P - 1``.

    The first ``cached_tokens`` positions were filled from the cache. ``published`` pages are in L1's index; their
    nodes are held, so they outlive the request only as long as nobody needs the room.
    """

    block_ids: list[int]
    cached_tokens: int
    cached: TierTokens
    nodes: list[Node] = field(default_factory=list)
    freed: bool = False

    @property
    def published(self) -> int:
        return len(self.nodes)
