"""From pages of groups to what subscribers want to know: which prefixes a tier can serve.

A boundary is announced for a tier when every group has its page there, and withdrawn when the first one lacks it. Only
what differs from what subscribers know at the end of a step is sent: a page that came and went within a step is not.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

from moonpool_worker.cache.events.sink import Tier
from moonpool_worker.cache.events.wire import Cleared, Event, Removed, Stored

#: Pages that are named but not held: of requests that wait, or evicted under a request that may bring them back.
_REMEMBERED = 1 << 16
_TIERS: tuple[Tier, ...] = ("l1", "l2")


class Publisher(Protocol):
    def publish(self, events: list[Event]) -> None: ...


class _Page:
    __slots__ = ("announced", "groups", "parent", "salt", "token_ids")

    def __init__(self) -> None:
        self.parent: bytes | None = None
        #: None: resident, but no request has named its text yet (L2 after a crash).
        self.token_ids: array[int] | None = None
        self.salt = b""
        #: Per tier, a bit for each group that has the page.
        self.groups = [0] * len(_TIERS)
        #: A bit for each tier that subscribers believe to have it.
        self.announced = 0


class Residency:
    """A :class:`~moonpool_worker.cache.events.sink.CacheEventSink` that hands batches to ``publisher``.

    ``groups``: how many cache groups there are. ``page``: tokens per page.
    """

    def __init__(self, publisher: Publisher, groups: int, page: int, tiers: Sequence[str] = ("l1", "l2")) -> None:
        self._publisher = publisher
        self._all_groups = (1 << groups) - 1
        self._page = page
        self._told = frozenset(tiers)
        self._pages: dict[bytes, _Page] = {}
        self._named: OrderedDict[bytes, _Page] = OrderedDict()
        self._dirty: dict[tuple[int, bytes], str] = {}
        self._announced = 0
        # A subscriber may remember an earlier process at this address.
        self._first: list[Event] = [Cleared()]

    @property
    def announced(self) -> int:
        """Boundaries that subscribers believe to be there, all tiers together."""
        return self._announced

    def described(self, links: Sequence[bytes], parent: bytes | None, token_ids: Sequence[int], salt: bytes) -> None:
        for index, link in enumerate(links):
            page = self._pages.get(link)
            if page is None:
                page = self._take_named(link)
                self._named[link] = page
            if page.token_ids is None:
                page.token_ids = array("I", token_ids[index * self._page : (index + 1) * self._page])
                page.parent, page.salt = parent, salt
                for tier in range(len(_TIERS)):
                    if page.groups[tier] == self._all_groups:
                        self._mark(tier, link, "restored")
            parent = link
        while len(self._named) > _REMEMBERED:
            self._named.popitem(last=False)

    def stored(self, tier: Tier, group: int, link: bytes, reason: str) -> None:
        if tier not in self._told:
            return
        page = self._pages.get(link)
        if page is None:
            page = self._pages[link] = self._take_named(link)
        number = _TIERS.index(tier)
        page.groups[number] |= 1 << group
        if page.groups[number] == self._all_groups:
            self._mark(number, link, reason)

    def removed(self, tier: Tier, group: int, link: bytes, reason: str) -> None:
        page = self._pages.get(link)
        if page is None or tier not in self._told:
            return
        number = _TIERS.index(tier)
        complete = page.groups[number] == self._all_groups
        page.groups[number] &= ~(1 << group)
        if complete or not any(page.groups):
            self._mark(number, link, reason)

    def flush(self) -> None:
        events, self._first = self._first, []
        events += self._changes()
        if events:
            self._publisher.publish(events)

    def _take_named(self, link: bytes) -> _Page:
        return self._named.pop(link) if link in self._named else _Page()

    def _mark(self, tier: int, link: bytes, reason: str) -> None:
        # To the end: what continues a page is told after it.
        self._dirty.pop((tier, link), None)
        self._dirty[tier, link] = reason

    def _changes(self) -> list[Event]:
        dirty, self._dirty = self._dirty, {}
        events: list[Event] = []
        for (tier, link), reason in dirty.items():
            page = self._pages.get(link)
            if page is None:
                # It left the last tier, and another one's entry has said so.
                continue
            bit = 1 << tier
            there = page.groups[tier] == self._all_groups and page.token_ids is not None
            if there and not page.announced & bit:
                page.announced |= bit
                self._announced += 1
                self._add_stored(events, _TIERS[tier], link, page, reason)
            elif not there and page.announced & bit:
                page.announced &= ~bit
                self._announced -= 1
                _add_removed(events, _TIERS[tier], link, reason)
            if not any(page.groups) and not page.announced:
                del self._pages[link]
                self._named[link] = page
        if events and not self._announced and all(isinstance(e, Removed) and e.reason == "flush" for e in events):
            return [Cleared()]
        return events

    def _add_stored(self, events: list[Event], tier: Tier, link: bytes, page: _Page, reason: str) -> None:
        assert page.token_ids is not None
        last = events[-1] if events else None
        if isinstance(last, Stored) and (last.tier, last.reason, last.links[-1]) == (tier, reason, page.parent):
            last.links.append(link)
            last.token_ids.extend(page.token_ids)
        else:
            tokens = page.token_ids.tolist()
            events.append(Stored(tier, [link], page.parent, tokens, self._page, page.salt, reason))


def _add_removed(events: list[Event], tier: Tier, link: bytes, reason: str) -> None:
    last = events[-1] if events else None
    if isinstance(last, Removed) and (last.tier, last.reason) == (tier, reason):
        last.links.append(link)
    else:
        events.append(Removed(tier, [link], reason))
