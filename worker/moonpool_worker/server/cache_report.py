"""``/v1/cache/stats``: everything that the cache counted, and the rates that follow from it."""

from __future__ import annotations

from typing import Any

import msgspec

from moonpool_worker.cache.events.publisher import EventPublisher
from moonpool_worker.cache.stats import CacheStats


def cache_report(stats: CacheStats, events: EventPublisher | None) -> dict[str, Any]:
    """Counters since the start and gauges of now; ``events`` is None in it when none are published."""
    # Not asdict(): Python 3.11's makes a counter of pairs of a Counter.
    report: dict[str, Any] = msgspec.to_builtins(stats)
    told = events and {
        "published": events.published,
        "dropped": events.dropped,
        "queued": events.queued,
        "replays": events.replays,
    }
    return report | {"rates": rates(stats), "events": told}


def rates(stats: CacheStats) -> dict[str, float]:
    """Shares of prompt tokens by tier, and bytes per second while copying; 0 for what has not happened."""
    hits, store = stats.hit_tokens, stats.store
    return {
        "hit_rate": _ratio(hits.total, stats.prompt_tokens),
        "l1_hit_rate": _ratio(hits.l1, stats.prompt_tokens),
        "l2_hit_rate": _ratio(hits.l2, stats.prompt_tokens),
        "l3_hit_rate": _ratio(hits.l3, stats.prompt_tokens),
        "l1_usage": _ratio(stats.l1_used_blocks, stats.l1_blocks),
        "l2_usage": _ratio(stats.l2_slots - stats.l2_free_slots, stats.l2_slots),
        "l2_write_bytes_per_s": _ratio(stats.l2_write_bytes, stats.l2_write_seconds),
        "l2_read_bytes_per_s": _ratio(stats.l2_read_bytes, stats.l2_read_seconds),
        "l3_get_bytes_per_s": _ratio(store.get_bytes, store.get_seconds),
        "l3_put_bytes_per_s": _ratio(store.put_bytes, store.put_seconds),
    }


def _ratio(part: float, whole: float) -> float:
    return round(part / whole, 4) if whole else 0.0
