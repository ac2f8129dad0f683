"""What the cache counted. Plain numbers; the server turns them into ``moonpool:*`` metrics."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields, replace


@dataclass(slots=True)
class TierTokens:
    """Tokens by the tier they came from."""

    l1: int = 0
    l2: int = 0
    l3: int = 0

    @property
    def total(self) -> int:
        return self.l1 + self.l2 + self.l3


@dataclass
class StoreCounters:
    """L3 since the start of this process. ``*_errors`` are keyed by Mooncake's code, or by a reason in words."""

    get_blocks: int = 0
    get_bytes: int = 0
    get_calls: int = 0
    get_seconds: float = 0.0
    get_errors: Counter[str] = field(default_factory=Counter)
    put_blocks: int = 0
    put_bytes: int = 0
    put_calls: int = 0
    put_seconds: float = 0.0
    put_errors: Counter[str] = field(default_factory=Counter)
    put_dropped: Counter[str] = field(default_factory=Counter)
    exist_calls: int = 0
    exist_seconds: float = 0.0
    exist_errors: Counter[str] = field(default_factory=Counter)
    #: Fetches by how they ended: complete, partial, absent, deadline, failed, cancelled.
    fetches: Counter[str] = field(default_factory=Counter)
    fetch_seconds: float = 0.0
    #: Requests that were not looked up in L3 although something was missing, by reason.
    unread: Counter[str] = field(default_factory=Counter)
    late_blocks: int = 0
    negative_hits: int = 0
    #: Client processes started, and those that ended without being asked to, by reason.
    client_starts: int = 0
    client_losses: Counter[str] = field(default_factory=Counter)
    breaker_opened: int = 0
    #: Trial reads and writes of an object of the worker's own.
    measurements: int = 0
    measure_errors: Counter[str] = field(default_factory=Counter)
    #: Measured now, 0 while unknown: bytes per second from the store, seconds of a call besides the bytes, and prompt
    #: tokens per second of the engine.
    bandwidth: float = 0.0
    latency: float = 0.0
    prefill_rate: float = 0.0


@dataclass(slots=True)
class GroupStats:
    """Pages of one cache group that can be found, by tier, and how many of them nobody refers to."""

    name: str
    family: str
    window: int | None
    block_tokens: int
    l1_pages: int
    l1_idle_pages: int
    l2_pages: int
    l2_idle_pages: int


@dataclass
class CacheStats:
    """A snapshot: counters since the start, then gauges of now."""

    #: Tokens of admitted prompts, those taken from a cache, and those that had to be computed.
    prompt_tokens: int = 0
    hit_tokens: TierTokens = field(default_factory=TierTokens)
    miss_tokens: int = 0
    admitted: int = 0
    refused: int = 0
    #: Requests that made room by going to L2, and those that came back from there.
    suspended: int = 0
    resumed: int = 0
    published_blocks: int = 0
    duplicate_blocks: int = 0
    l1_evictions: Counter[str] = field(default_factory=Counter)
    l2_evictions: Counter[str] = field(default_factory=Counter)
    #: Bytes copied between L1 and L2, and the seconds it took.
    l2_write_bytes: int = 0
    l2_write_seconds: float = 0.0
    l2_read_bytes: int = 0
    l2_read_seconds: float = 0.0
    #: Blocks that found no slot in L2.
    l2_write_dropped: int = 0
    #: Keyed "l2.<reason>" and "l3.<reason>".
    header_mismatches: Counter[str] = field(default_factory=Counter)
    store: StoreCounters = field(default_factory=StoreCounters)

    # Gauges.
    l1_blocks: int = 0
    l1_free_blocks: int = 0
    l1_evictable_blocks: int = 0
    l1_cached_blocks: int = 0
    #: Blocks with something that a request refers to.
    l1_used_blocks: int = 0
    l2_slots: int = 0
    l2_free_slots: int = 0
    l2_cached_blocks: int = 0
    l2_lent_slots: int = 0
    l2_quarantined_slots: int = 0
    put_queue: int = 0
    fetches_active: int = 0
    #: closed, open or half-open.
    breaker: str = "closed"
    store_state: str = "off"
    store_error: str = ""
    client_pid: int = 0
    groups: tuple[GroupStats, ...] = ()


def snapshot(stats: CacheStats) -> CacheStats:
    """A copy that later counting does not change."""
    copy = replace(stats, hit_tokens=replace(stats.hit_tokens), store=replace(stats.store))
    for holder, source in ((copy, stats), (copy.store, stats.store)):
        for each in fields(source):
            value = getattr(source, each.name)
            if isinstance(value, Counter):
                setattr(holder, each.name, Counter(value))
    return copy
