"""How much of a real day's prompts would the cache serve, and how much could any cache serve?

Drives the real cache core, without a model and with rows of 32 bytes, by a published trace: every request is admitted,
its pages are published, and it is freed before the next one. Per capacity ``c`` (L1 blocks of 512 tokens):
``c<c>_hit_rate`` is the share of prompt tokens that L1 had, ``c<c>_hit_rate_l2`` what L2 of ``--l2-ratio`` times the
size adds; beside them the same requests under LRU, under Belady's MIN, and with nothing ever forgotten, of L1's size.
Requests that do not fit in L1 count as misses for all. Answers are not in the traces, so only prompts are cached.

``uv run python -m benchmarks.trace --trace ../shared/traces/mooncake/conversation_trace.jsonl``. The Claude Code
archive has 49,334 requests of 240 blocks each: ``--limit 5000 --l2-ratio 0`` is enough of it for a look.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from moonpool_api.geometry import full_attention
from moonpool_worker.cache.device_arena import DeviceArena
from moonpool_worker.cache.kv_cache import KVCache

from benchmarks.harness import policies
from benchmarks.harness.report import Report, say
from benchmarks.harness.traces import Arrival, Trace, read_trace

#: A page of the trace is one token of the core, whose id is the page's: the core's own hash chain names it.
GEOMETRY = full_attention(layers=1, kv_heads=1, head_dim=8, dtype="bfloat16", prefix_granularity=1)
#: A slot of L2: a header of 128 bytes, and K and V in a cache line each.
SLOT = 256

#: Where the traces lie that the project was built with.
TRACE = Path("../shared/traces/mooncake/conversation_trace.jsonl")


@dataclass(slots=True)
class Hits:
    """Pages by tier, and the processor's seconds that the core took for all requests."""

    l1: int = 0
    l2: int = 0
    refused: int = 0
    seconds: float = 0.0


def drive(arrivals: list[Arrival], page: int, capacity: int, l2_ratio: float) -> Hits:
    """Give the core every request, one after another."""
    slots = int(capacity * l2_ratio)
    cache = KVCache(DeviceArena(GEOMETRY, capacity + 1), "0" * 64, slots * SLOT, l2_alignment=64)
    assert cache.stats().l2_slots == slots
    hits = Hits()
    begin = time.process_time()
    for arrival in arrivals:
        chain = cache.chain(arrival.pages)
        whole = len(arrival.pages)
        tokens = whole + (arrival.tokens > whole * page)
        allocation = cache.admit(chain, tokens) if tokens <= cache.usable_blocks else None
        if allocation is None:
            hits.refused += 1
            continue
        hits.l1 += allocation.cached.l1
        hits.l2 += allocation.cached.l2
        cache.publish(allocation, chain, whole)
        cache.free(allocation)
        cache.poll()
    hits.seconds = time.process_time() - begin
    cache.close()
    return hits


def measure(report: Report, trace: Trace, capacity: int, l2_ratio: float) -> None:
    fitting = [arrival for arrival in trace.arrivals if -(-arrival.tokens // trace.page) <= capacity]
    tokens = sum(arrival.tokens for arrival in trace.arrivals)

    def rate(pages: int) -> float:
        return pages * trace.page / tokens

    def timed(name: str, work: Callable[[], int]) -> float:
        begin = time.perf_counter()
        pages = work()
        say(f"capacity {capacity}: {name} {rate(pages):.4f} in {time.perf_counter() - begin:.1f} s")
        return rate(pages)

    core = drive(trace.arrivals, trace.page, capacity, l2_ratio)
    say(f"capacity {capacity}: core {rate(core.l1):.4f} + L2 {rate(core.l2):.4f} in {core.seconds:.1f} s")
    figures: dict[str, float | int | str | None] = {
        "hit_rate": rate(core.l1),
        "hit_rate_l2": rate(core.l2),
        "hit_rate_lru": timed("LRU", lambda: policies.lru(fitting, trace.page, capacity)),
        "hit_rate_belady": timed("Belady", lambda: policies.belady(fitting, trace.page, capacity)),
        "hit_rate_infinite": timed("infinite", lambda: policies.infinite(fitting, trace.page)),
        "refused": core.refused,
        "core_us_per_page": core.seconds / sum(len(arrival.pages) for arrival in trace.arrivals) * 1e6,
    }
    report.add(**{f"c{capacity}_{key}": value for key, value in figures.items()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, default=TRACE, help="a .jsonl of Mooncake's, or Claude Code's .tar.xz")
    parser.add_argument("--capacities", type=int, nargs="+", default=[1000, 5000, 20000], metavar="BLOCKS")
    parser.add_argument("--l2-ratio", type=float, default=4.0, help="L2 by L1's size; 0: no L2")
    parser.add_argument("--limit", type=int, help="only so many requests")
    parser.add_argument("--conversations", type=int, default=64, help="of the archive, at the same time")
    options = parser.parse_args()
    report = Report("trace")
    if not options.trace.exists():
        report.add(hit_rate=None, why=f"there is no trace at {options.trace}: name one with --trace")
        print(report.line())
        return
    trace = read_trace(options.trace, options.limit, options.conversations)
    pages = sum(len(arrival.pages) for arrival in trace.arrivals)
    report.add(
        trace=trace.name,
        requests=len(trace.arrivals),
        prompt_tokens=sum(arrival.tokens for arrival in trace.arrivals),
        tokens_per_block=trace.page,
        distinct_blocks=len({page for arrival in trace.arrivals for page in arrival.pages}),
        l2_ratio=options.l2_ratio,
    )
    say(f"{trace.name}: {len(trace.arrivals)} requests, {pages} pages")
    for capacity in options.capacities:
        measure(report, trace, capacity, options.l2_ratio)
    print(report.line())


if __name__ == "__main__":
    main()
