"""A cache group as the tiers see it: how many blocks a page has, which of them are kept, what a hit needs.

The unit of every tier is a *page* of one group: ``P`` tokens, one entry in the index, one slot in L2, one object in
L3. Blocks are smaller where a group's ``block_tokens`` is; they are what a request's table is made of.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from moonpool_api.geometry import CacheGeometry, GroupGeometry


class Retention(enum.Enum):
    #: All of the text; a hit of n pages needs pages 0 to n - 1.
    FULL = "full"
    #: The last tokens of the text; a hit needs the pages just before its boundary.
    WINDOW = "window"
    #: A checkpoint; a hit needs the one exactly at its boundary.
    STATE = "state"


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """``per_page``: blocks of a page in a table; ``kept``: the last so many of them are what a tier keeps;
    ``run``: pages before a boundary that a hit needs (0: all)."""

    index: int
    geometry: GroupGeometry
    retention: Retention
    per_page: int
    kept: int
    run: int

    @property
    def closed(self) -> bool:
        """Whether a hit of n pages implies one of every smaller number: only such a group is evicted leaf first."""
        return self.retention is Retention.FULL

    def blocks_for(self, tokens: int) -> int:
        """Length of the table of so many tokens."""
        if self.retention is Retention.STATE:
            return 0
        return -(-tokens // self.geometry.block_tokens)

    def passed(self, computed: int) -> int:
        """Leading blocks that no token from ``computed`` on looks at."""
        window = self.geometry.window
        if window is None:
            return 0
        return max(0, (computed - window + 1) // self.geometry.block_tokens)


def cache_groups(geometry: CacheGeometry) -> tuple[CacheGroup, ...]:
    return tuple(_group(index, group, geometry.prefix_granularity) for index, group in enumerate(geometry.groups))


def _group(index: int, group: GroupGeometry, page: int) -> CacheGroup:
    if group.family == "state":
        return CacheGroup(index, group, Retention.STATE, per_page=1, kept=1, run=1)
    per_page = page // group.block_tokens
    if group.window is None:
        return CacheGroup(index, group, Retention.FULL, per_page, kept=per_page, run=0)
    behind = max(1, group.window - 1)
    kept = min(per_page, -(-behind // group.block_tokens))
    return CacheGroup(index, group, Retention.WINDOW, per_page, kept, run=-(-behind // page))
