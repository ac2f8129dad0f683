"""Reads: which blocks a request wants from L3, whether that pays, and their way to L2 before a deadline."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from moonpool_worker.cache.block_header import Mismatch, key_digest
from moonpool_worker.cache.events.sink import CacheEventSink
from moonpool_worker.cache.host_tier import HostTier
from moonpool_worker.cache.prefix_match import Composition, Has
from moonpool_worker.cache.stats import StoreCounters
from moonpool_worker.cache.store_tier import breaker as breaking
from moonpool_worker.cache.store_tier import messages
from moonpool_worker.cache.store_tier.calls import Call
from moonpool_worker.cache.store_tier.client import Client
from moonpool_worker.cache.store_tier.codes import NOT_FOUND
from moonpool_worker.cache.store_tier.fetch import Fetch, Place
from moonpool_worker.cache.store_tier.keys import store_key
from moonpool_worker.cache.store_tier.negative_cache import NegativeCache
from moonpool_worker.cache.store_tier.options import StoreOptions
from moonpool_worker.cache.store_tier.rates import Rates

#: No call is larger, whatever its pages are: what comes late should not be all.
_CALL_BYTES = 64 << 20
#: Without a measured rate: base and per page of a fetch's deadline, in seconds.
_BASE, _PER_PAGE = 0.5, 0.01
#: With one: the base, in calls besides a part that a busy machine needs; and how much longer than expected is patience.
_BUSY, _CALLS, _SLACK = 0.5, 20, 4


class Fetches:
    """All fetches under way."""

    def __init__(
        self,
        client: Client,
        host: HostTier,
        composition: Composition,
        options: StoreOptions,
        counters: StoreCounters,
        mismatches: Counter[str],
        rates: Rates,
        events: CacheEventSink | None = None,
    ) -> None:
        self._client = client
        self._host = host
        self._composition = composition
        self._page_tokens = host.arena.geometry.prefix_granularity
        self._options = options
        self._counters = counters
        self._mismatches = mismatches
        self._rates = rates
        self._events = events
        #: Why the last request that was looked at got no fetch, "" when it got one or nothing was missing.
        self.unread = ""
        self._active: set[Fetch] = set()
        self._absent = NegativeCache(ttl=options.negative_ttl)
        #: Bytes that the store was asked for and has not sent yet: a new read waits behind them.
        self._queued_bytes = 0

    def __len__(self) -> int:
        return len(self._active)

    # -- beginning and ending ----------------------------------------------------------------------------------

    def start(self, chain: list[bytes], pages: int, here: Has) -> Fetch | None:
        """Ask for what the first ``pages`` pages lack; None, and :attr:`unread` says why, when that is no use."""
        self.unread, places = self._worth_asking(chain, pages, here)
        if not places:
            if self.unread:
                self._counters.unread[self.unread] += 1
            return None
        now = self._client.now()
        fetch = Fetch(chain, pages, here, now, now, now + self._look_up_patience())
        self._active.add(fetch)
        for start in range(0, len(places), messages.MAX_KEYS):
            fetch.calls += 1
            self._client.send(_Exist(self, fetch, places[start : start + messages.MAX_KEYS]))
        return fetch

    def _worth_asking(self, chain: list[bytes], pages: int, here: Has) -> tuple[str, list[Place]]:
        """A reason not to, or the blocks to ask the store for; neither when nothing is missing."""
        client = self._client
        if not client.ready:
            return "closed" if client.target is None else "not open", []
        if not client.accepts:
            return "breaker" if client.breaker.state == breaking.OPEN else "trial", []
        unknown = self._composition.unknown(pages, here)
        if not unknown:
            return "", []
        now = client.now()
        hopeful = {place for place in unknown if not self._absent.contains((place[0], chain[place[1]]), now)}
        boundary, wanted = self._plan(pages, here, hopeful)
        gain = boundary - self._composition.joint(pages, here).boundary
        if gain < self._options.min_pages:
            known = len(hopeful) < len(unknown)
            self._counters.negative_hits += known
            return "absent" if known else "few pages", []
        if not self._pays(gain, wanted):
            client.measure_again()
            return "dearer than computing", []
        return "", [place for place in unknown if place in hopeful and place[1] < boundary]

    def drop(self, fetch: Fetch) -> None:
        """The request does not wait any more, or has been admitted: let go of what was held for it."""
        if not fetch.done:
            self._finish(fetch, "cancelled")
        held, fetch.held = fetch.held, []
        for node in held:
            self._host.release(node)

    def finish_all(self, outcome: str) -> None:
        for fetch in list(self._active):
            self._finish(fetch, outcome)
        if outcome == "closed":
            self._absent.clear()

    def poll(self) -> None:
        """Keep the deadlines."""
        now = self._client.now()
        for fetch in [fetch for fetch in self._active if now >= fetch.deadline]:
            self._finish(fetch, "deadline")
            # Not one answer to anybody: the next request need not wait as long to see the same.
            self._client.fault("fetches take too long", certain=self._client.last_answer <= fetch.since)

    def written(self, group: int, digest: bytes) -> None:
        """The store has this block now."""
        self._absent.discard((group, digest))

    # -- deciding ----------------------------------------------------------------------------------------------

    def _plan(self, pages: int, here: Has, stored: set[Place]) -> tuple[int, list[Place]]:
        plan = self._composition.plan_fetch(pages, here, lambda group, position: (group, position) in stored)
        return plan.boundary, plan.wanted

    def _bytes(self, places: list[Place]) -> int:
        return sum(self._host.object_bytes(group) for group, _ in places)

    def _pays(self, gained_pages: int, wanted: list[Place]) -> bool:
        return self._options.always or self._rates.cheaper(
            self._queued_bytes + self._bytes(wanted), gained_pages * self._page_tokens
        )

    @property
    def _base(self) -> float:
        if self._options.timeout_base is not None:
            return self._options.timeout_base
        return _BUSY + _CALLS * self._rates.latency if self._rates.bandwidth else _BASE

    def _look_up_patience(self) -> float:
        """Seconds that a request waits to hear what the store has: half of the base."""
        return self._base / 2

    def _read_patience(self, pages: int, nbytes: int) -> float:
        """Seconds that it waits for ``pages`` pages of ``nbytes`` from then on: the rest of base + per page."""
        options, base = self._options, self._base
        if options.timeout_per_page is not None:
            return base / 2 + pages * options.timeout_per_page
        expected = self._rates.fetch_seconds(self._queued_bytes + nbytes)
        of_pages = pages * _PER_PAGE if expected is None else _SLACK * expected
        return max(base / 2, min(base / 2 + of_pages, options.timeout_limit - base / 2))

    # -- on the way --------------------------------------------------------------------------------------------

    def exist_answered(self, fetch: Fetch, places: list[Place], reply: messages.Reply) -> None:
        counters, client = self._counters, self._client
        counters.exist_calls += 1
        counters.exist_seconds += reply.seconds
        fault = client.judge(reply, counters.exist_errors)
        fetch.calls -= 1
        if fetch.done:
            return
        if fault or len(reply.codes) != len(places):
            self._finish(fetch, "failed")
            return
        self._rates.measured_latency(reply.seconds)
        now = client.now()
        for place, code in zip(places, reply.codes, strict=True):
            if code == 1:
                fetch.stored.add(place)
            else:
                self._absent.add((place[0], fetch.chain[place[1]]), now)
        if not fetch.calls:
            self._read(fetch)

    def _read(self, fetch: Fetch) -> None:
        """The store has said what it has: read what makes the longest hit."""
        boundary, wanted = self._plan(fetch.pages, fetch.here, fetch.stored)
        gain = boundary - self._composition.joint(fetch.pages, fetch.here).boundary
        if gain < max(1, self._options.min_pages):
            self._finish(fetch, "absent")
            return
        if not self._pays(gain, wanted):
            self._finish(fetch, "dearer than computing")
            return
        # What is there already must still be there when the rest arrives.
        for group in range(self._host.num_groups):
            for position in self._composition.needs(group, boundary):
                node = self._host.index.get(group, fetch.chain[position])
                if node is not None:
                    self._host.index.ref(node)
                    fetch.held.append(node)
        # Counted from now: between two polls lies a whole step of the engine, which is not the store's fault.
        now = self._client.now()
        fetch.since, fetch.deadline = now, now + self._read_patience(gain, self._bytes(wanted))
        fetch.wanted = len(wanted)
        for batch in self._batches(wanted):
            slots = self._borrow(batch)
            if slots:
                fetch.calls += 1
                self._client.send(_Get(self, fetch, batch[: len(slots)], slots))
            if len(slots) < len(batch):
                break
        if not fetch.calls:
            self._finish(fetch, "no room")

    def _batches(self, places: list[Place]) -> Iterator[list[Place]]:
        """In order: at most so many different pages, bytes, and blocks as a packet holds, but one block at least."""
        batch: list[Place] = []
        pages: set[int] = set()
        nbytes = 0
        for place in places:
            size = self._host.object_bytes(place[0])
            more = len(pages) + (place[1] not in pages)
            full = more > self._options.batch_pages or len(batch) == messages.MAX_KEYS or nbytes + size > _CALL_BYTES
            if batch and full:
                yield batch
                batch, pages, nbytes = [], set(), 0
            batch.append(place)
            pages.add(place[1])
            nbytes += size
        if batch:
            yield batch

    def _borrow(self, places: list[Place]) -> list[int]:
        slots: list[int] = []
        for group, _ in places:
            slot = self._host.take_slot(group)
            if slot is None:
                break
            slots.append(slot)
        self._host.lent += len(slots)
        return slots

    def describe(self, fetch: Fetch, places: list[Place], slots: list[int], number: int) -> messages.Get:
        host = self._host
        return messages.Get(
            number,
            [group for group, _ in places],
            [fetch.chain[position] for _, position in places],
            [host.offset(group, slot) for (group, _), slot in zip(places, slots, strict=True)],
            [host.object_bytes(group) for group, _ in places],
        )

    def sent(self, places: list[Place]) -> None:
        self._queued_bytes += self._bytes(places)

    def get_answered(self, fetch: Fetch, places: list[Place], slots: list[int], reply: messages.Reply) -> None:
        counters, client, host = self._counters, self._client, self._host
        counters.get_calls += 1
        counters.get_seconds += reply.seconds
        self._queued_bytes -= self._bytes(places)
        fault = client.judge(reply, counters.get_errors)
        if not fault:
            client.works()
        codes = reply.codes if len(reply.codes) == len(slots) else [-1] * len(slots)
        host.lent -= len(slots)
        read = 0
        for place, slot, code in zip(places, slots, codes, strict=True):
            group, digest = place[0], fetch.chain[place[1]]
            if code == host.object_bytes(group):
                read += code
                counters.get_blocks += 1
                self._adopt(fetch, place, slot)
                continue
            if code in (NOT_FOUND, 0):
                self._absent.add((group, digest), client.now())
            elif code > 0:
                self._mismatches["l3.length"] += 1
            host.give_slot(group, slot)
        counters.get_bytes += read
        if read and not fault:
            self._rates.measured_read(read, reply.seconds)
        fetch.calls -= 1
        if not fetch.done and not fetch.calls:
            complete = len(fetch.fetched) == fetch.wanted
            self._finish(fetch, "complete" if complete else "failed" if fault and not fetch.fetched else "partial")

    def get_lost(self, fetch: Fetch, places: list[Place], slots: list[int]) -> None:
        self._queued_bytes -= self._bytes(places)
        self._host.lent -= len(slots)
        for (group, _), slot in zip(places, slots, strict=True):
            self._host.give_slot(group, slot)
        self.call_lost(fetch)

    def call_lost(self, fetch: Fetch) -> None:
        fetch.calls -= 1
        if not fetch.done:
            self._finish(fetch, "failed")

    def _adopt(self, fetch: Fetch, place: Place, slot: int) -> None:
        (group, position), host = place, self._host
        digest = fetch.chain[position]
        node = host.index.get(group, digest)
        if node is not None:
            # Computed and published while it was on its way.
            host.give_slot(group, slot)
            host.index.ref(node)
        else:
            parent = fetch.chain[position - 1] if position else None
            name = key_digest(store_key(self._namespace, digest, group))
            adopted = host.adopt(group, slot, digest, parent, position, name)
            if isinstance(adopted, Mismatch):
                self._mismatches[f"l3.{adopted.value}"] += 1
                host.give_slot(group, slot)
                return
            node = adopted
            node.stored = self._client.generation
            if self._events is not None and host.retain:
                self._events.stored("l2", group, digest, "fetched")
        if fetch.done:
            self._counters.late_blocks += 1
            host.release(node)
            return
        fetch.fetched.add((group, digest))
        fetch.held.append(node)

    @property
    def _namespace(self) -> str:
        target = self._client.target
        return target.namespace if target else ""

    def _finish(self, fetch: Fetch, outcome: str) -> None:
        fetch.done, fetch.outcome = True, outcome
        self._active.discard(fetch)
        self._counters.fetches[outcome] += 1
        self._counters.fetch_seconds += self._client.now() - fetch.started


class _Exist(Call):
    kind = "exist"

    def __init__(self, fetches: Fetches, fetch: Fetch, places: list[Place]) -> None:
        self._fetches, self._fetch, self._places = fetches, fetch, places

    def request(self, number: int) -> messages.Request:
        chain = self._fetch.chain
        return messages.Exist(number, [group for group, _ in self._places], [chain[at] for _, at in self._places])

    def answered(self, reply: messages.Reply) -> None:
        self._fetches.exist_answered(self._fetch, self._places, reply)

    def lost(self) -> None:
        self._fetches.call_lost(self._fetch)


class _Get(Call):
    kind = "get"

    def __init__(self, fetches: Fetches, fetch: Fetch, places: list[Place], slots: list[int]) -> None:
        self._fetches, self._fetch, self._places, self._slots = fetches, fetch, places, slots

    def request(self, number: int) -> messages.Request:
        self._fetches.sent(self._places)
        return self._fetches.describe(self._fetch, self._places, self._slots, number)

    def answered(self, reply: messages.Reply) -> None:
        self._fetches.get_answered(self._fetch, self._places, self._slots, reply)

    def lost(self) -> None:
        self._fetches.get_lost(self._fetch, self._places, self._slots)

    @property
    def quarantined(self) -> int:
        return len(self._slots) if self._fetch.done else 0
