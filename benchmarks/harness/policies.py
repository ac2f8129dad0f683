"""What other policies would hit of the same requests with the same room: pages counted, no bytes moved.

All keep the rule of an engine: while a request is computed all its pages are resident, and one block more for its
last, incomplete page. A hit is a run of resident pages from the beginning.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from benchmarks.harness.traces import Arrival


def usable(arrival: Arrival, page: int) -> int:
    """Pages that may come from a cache: the last token is always computed."""
    return min(len(arrival.pages), (arrival.tokens - 1) // page)


def infinite(arrivals: Sequence[Arrival], page: int) -> int:
    """Hit pages of a cache that forgets nothing: the most that any policy can have."""
    seen: set[int] = set()
    hits = 0
    for arrival in arrivals:
        for each in arrival.pages[: usable(arrival, page)]:
            if each not in seen:
                break
            hits += 1
        seen.update(arrival.pages)
    return hits


def lru(arrivals: Sequence[Arrival], page: int, capacity: int) -> int:
    """Hit pages when the least recently used goes first, and of one request's pages the last one first."""
    resident: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for arrival in arrivals:
        hits += _hits(arrival, page, resident)
        for each in reversed(arrival.pages):
            resident[each] = None
            resident.move_to_end(each)
        room = capacity - _extra(arrival, page)
        while len(resident) > room:
            resident.popitem(last=False)
    return hits


def belady(arrivals: Sequence[Arrival], page: int, capacity: int) -> int:
    """Hit pages when the page goes whose next use is farthest away (Belady's MIN), of equals the deepest.

    Whoever uses a page uses all before it, so a page's next use is never later than that of what continues it: what
    MIN keeps is always a usable prefix, and MIN is the offline optimum for pages of equal size that are all resident
    while their request runs.
    """
    next_uses = _next_uses(arrivals)
    depths: dict[int, int] = {}
    resident: dict[int, int] = {}
    queue: list[tuple[int, int, int]] = []
    hits = at = 0
    for arrival in arrivals:
        hits += _hits(arrival, page, resident)
        coming = next_uses[at : at + len(arrival.pages)].tolist()
        at += len(arrival.pages)
        # The request's own pages are put on the queue after it has taken its room: nothing evicts them.
        resident.update(zip(arrival.pages, coming, strict=True))
        room = capacity - _extra(arrival, page)
        while len(resident) > room:
            negative, _, victim = heapq.heappop(queue)
            if resident.get(victim) == -negative:
                del resident[victim]
        for depth, (each, use) in enumerate(zip(arrival.pages, coming, strict=True)):
            depths[each] = depth
            heapq.heappush(queue, (-use, -depth, each))
        if len(queue) > 4 * capacity + len(arrival.pages):
            queue = [(-use, -depths[each], each) for each, use in resident.items()]
            heapq.heapify(queue)
    return hits


def _hits(arrival: Arrival, page: int, resident: OrderedDict[int, None] | dict[int, int]) -> int:
    limit = usable(arrival, page)
    for count, each in enumerate(arrival.pages[:limit]):
        if each not in resident:
            return count
    return limit


def _extra(arrival: Arrival, page: int) -> int:
    return int(arrival.tokens > len(arrival.pages) * page)


def _next_uses(arrivals: Sequence[Arrival]) -> np.ndarray:
    """For each page of each request the number of the next request that uses it; the number of requests if none."""
    pages = np.fromiter((each for arrival in arrivals for each in arrival.pages), dtype=np.int64)
    numbers = np.repeat(np.arange(len(arrivals)), [len(arrival.pages) for arrival in arrivals])
    order = np.argsort(pages, kind="stable")
    following = np.full(len(pages), len(arrivals), dtype=np.int64)
    same = pages[order[:-1]] == pages[order[1:]]
    following[order[:-1][same]] = numbers[order[1:][same]]
    return following
