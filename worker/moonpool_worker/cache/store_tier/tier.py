"""L3 as the cache sees it: fetches that end by themselves, puts that never wait, and a client that may die.

All work is done in :meth:`StoreTier.poll`, which never blocks. Only :meth:`StoreTier.close` waits, up to a deadline.
A slot that was lent to the client process is touched by nobody else until the process has answered for it or has been
killed and reaped.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence

from moonpool_worker.cache.events.sink import CacheEventSink
from moonpool_worker.cache.host_tier import HostTier
from moonpool_worker.cache.prefix_index import Node
from moonpool_worker.cache.prefix_match import Composition, Has
from moonpool_worker.cache.stats import StoreCounters
from moonpool_worker.cache.store_tier.client import Client, StoreState, Target
from moonpool_worker.cache.store_tier.client_process import ClientProcess
from moonpool_worker.cache.store_tier.fetch import Fetch
from moonpool_worker.cache.store_tier.fetches import Fetches
from moonpool_worker.cache.store_tier.options import StoreOptions
from moonpool_worker.cache.store_tier.puts import Puts
from moonpool_worker.cache.store_tier.rates import Rates


class StoreTier:
    """One tenant of one store at a time, over the slots of ``host``.

    ``mismatches`` counts what came back from the store and was not the block asked for; ``events`` hears what came to
    L2.
    """

    def __init__(
        self,
        host: HostTier,
        composition: Composition,
        options: StoreOptions,
        counters: StoreCounters,
        mismatches: Counter[str],
        clock: Callable[[], float] = time.monotonic,
        spawn: Callable[[int, dict[str, str]], ClientProcess] = ClientProcess,
        events: CacheEventSink | None = None,
    ) -> None:
        self.rates = Rates()
        self._counters = counters
        self._client = Client(host, options, counters, self.rates, clock, spawn)
        self._client.on_gone = self._gone
        self._fetches = Fetches(self._client, host, composition, options, counters, mismatches, self.rates, events)
        self._puts = Puts(self._client, host, options, counters, self._fetches.written)

    @property
    def state(self) -> StoreState:
        return self._client.state

    @property
    def breaker_state(self) -> str:
        return self._client.breaker.state

    @property
    def client_pid(self) -> int:
        return self._client.pid

    @property
    def queued_puts(self) -> int:
        return len(self._puts)

    @property
    def active_fetches(self) -> int:
        return len(self._fetches)

    @property
    def unread(self) -> str:
        """Why the last :meth:`start_fetch` returned None; "" when nothing was missing."""
        return self._fetches.unread

    @property
    def quarantined_slots(self) -> int:
        return self._client.quarantined_slots

    def open(self, namespace: str, tenant: str, master: str) -> None:
        """Begin to open; :attr:`state` tells the rest. The same target again is nothing; another closes first."""
        self._client.open(Target(namespace, tenant, master))

    def close(self) -> None:
        """Return when the client process is gone: closed by its own hand, or killed at the deadline."""
        self._client.close()

    def start_fetch(self, chain: list[bytes], pages: int, here: Has) -> Fetch | None:
        """Ask for what the first ``pages`` pages of ``chain`` lack; None when L3 cannot help or is not worth it.

        ``here(group, page)``: whether a block is in L1 or L2 now.
        """
        return self._fetches.start(chain, pages, here)

    def drop(self, fetch: Fetch) -> None:
        """The request does not wait any more, or has been admitted: let go of what was held for it. Twice is once."""
        self._fetches.drop(fetch)

    def put(self, nodes: Sequence[Node]) -> None:
        """Queue resident blocks for the store; dropped, and counted, when L3 is not keeping up or not there."""
        self._puts.put(nodes)

    def offer(self, nodes: Sequence[Node]) -> None:
        """Blocks were used again: queue those that the store is not known to have, as far as there is room."""
        self._puts.offer(nodes)

    def observe_prefill(self, tokens: int, seconds: float) -> None:
        """The engine computed prompt tokens in a step of so many seconds."""
        self.rates.measured_prefill(tokens, seconds)

    def note_rates(self) -> None:
        """Write the rates into the counters."""
        counters, rates = self._counters, self.rates
        counters.bandwidth, counters.latency, counters.prefill_rate = rates.bandwidth, rates.latency, rates.prefill

    def fileno(self) -> int | None:
        """A descriptor that becomes readable when :meth:`poll` has something to take in."""
        return self._client.fileno()

    def poll(self) -> None:
        """Take in answers, keep deadlines, restart the client, send what waits. Never blocks."""
        self._client.poll()
        self._fetches.poll()
        self._puts.poll()

    def _gone(self, reason: str) -> None:
        self._puts.drop(reason)
        self._fetches.finish_all("closed" if reason == "closed" else "failed")
