"""What a request holds of the cache, and what a look at the cache found."""

from __future__ import annotations

from dataclasses import dataclass, field

from moonpool_worker.cache.prefix_index import Node
from moonpool_worker.cache.stats import TierTokens


@dataclass(frozen=True, slots=True)
class Probe:
    """Leading pages of a chain that all groups could be resumed behind: ``l1`` with L1 alone, ``l2`` more with L2.

    ``agreed`` pages are there for the groups that keep all of the text; where that is more, a checkpoint is missing.
    L3 is not asked.
    """

    l1: int
    l2: int
    granularity: int
    agreed: int = 0

    @property
    def blocks(self) -> int:
        return self.l1 + self.l2

    @property
    def tokens(self) -> int:
        return self.blocks * self.granularity


@dataclass(slots=True)
class Hold:
    """One group's part of an allocation.

    History: ``table`` is the block table, 0 where a window has passed; ``nodes[page]`` is the node that is held for a
    page, None for one that is let go of or private. State: ``live`` is where the state goes, 0 before there is a block
    for it; ``source`` is the block it is read from; ``origin`` is the cached checkpoint that the text begins with, as
    long as it is read from; ``checkpoints`` are blocks for states on the way, by position.
    """

    table: list[int] = field(default_factory=list)
    nodes: list[Node | None] = field(default_factory=list)
    passed: int = 0
    live: int = 0
    source: int = 0
    origin: Node | None = None
    checkpoints: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Allocation:
    """The first ``cached_tokens`` positions were filled from the cache, the first ``computed`` are in their blocks.

    ``published`` pages have been offered to L1's index. ``room``: tokens up to which :meth:`KVCache.extend` has
    nothing to do. ``wanted``: positions whose states should be kept. ``tables[g]`` is the block table of group ``g``,
    empty for a state group.
    """

    holds: list[Hold]
    cached_tokens: int
    cached: TierTokens
    computed: int
    published: int
    wanted: list[int] = field(default_factory=list)
    room: int = 0
    freed: bool = False
    tables: tuple[list[int], ...] = ()

    def __post_init__(self) -> None:
        self.tables = tuple(hold.table for hold in self.holds)

    @property
    def block_ids(self) -> list[int]:
        """The first group's table."""
        return self.holds[0].table
