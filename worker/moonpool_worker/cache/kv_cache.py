"""The one door to the three tiers of cached KV. All calls come from the engine's thread, and none of them blocks.

Only :meth:`KVCache.close_store` and :meth:`KVCache.close` wait, for the L3 process to be gone, up to a deadline.
"""

from __future__ import annotations

from collections.abc import Sequence

from moonpool_worker.cache.admission import Admission
from moonpool_worker.cache.allocation import Allocation, Probe
from moonpool_worker.cache.device_arena import DeviceArena
from moonpool_worker.cache.device_tier import DeviceTier
from moonpool_worker.cache.events.sink import CacheEventSink
from moonpool_worker.cache.hash_chain import hash_chain
from moonpool_worker.cache.host_layout import SLOT_ALIGNMENT
from moonpool_worker.cache.host_tier import HostTier, RestoreReport
from moonpool_worker.cache.prefix_index import Node
from moonpool_worker.cache.prefix_match import Composition
from moonpool_worker.cache.stats import CacheStats, GroupStats, snapshot
from moonpool_worker.cache.store_tier.client import StoreState
from moonpool_worker.cache.store_tier.fetch import Fetch
from moonpool_worker.cache.store_tier.options import StoreOptions
from moonpool_worker.cache.store_tier.tier import StoreTier
from moonpool_worker.cache.suspension import Suspended, Suspension
from moonpool_worker.cache.tier_copies import TierCopies


class KVCache:
    """L1 blocks of ``arena``, ``l2_bytes`` of host memory (0: off), and L3 when ``store`` is given.

    ``namespace`` (64 hex digits) names every page in L2 and L3. Published pages are copied to L2 at once and queued
    for L3; a page evicted from L1 is still in L2. With ``prefix_caching`` off nothing is ever published or found.
    ``l2_fd``: a memfd for L2, with what an earlier process left in it. ``events`` hears where pages come and go.
    """

    def __init__(
        self,
        arena: DeviceArena,
        namespace: str,
        l2_bytes: int = 0,
        store: StoreOptions | None = None,
        prefix_caching: bool = True,
        events: CacheEventSink | None = None,
        l2_fd: int | None = None,
        l2_alignment: int = SLOT_ALIGNMENT,
    ) -> None:
        self.arena = arena
        self.namespace = namespace
        self.granularity = arena.geometry.prefix_granularity
        self.prefix_caching = prefix_caching
        self._events = events
        self._stats = CacheStats()
        self._device = DeviceTier(arena, self._leaves_l1)
        self._pool = self._device.pool
        self.composition = Composition(self._device.groups)
        self._host: HostTier | None = None
        self._store: StoreTier | None = None
        if prefix_caching and l2_bytes:
            self._host = HostTier(arena, l2_bytes, fd=l2_fd, alignment=l2_alignment, on_evict=self._leaves_l2)
        elif prefix_caching and store is not None:
            self._host = HostTier(arena, store.staging_bytes, retain=False)
        if store is not None and self._host is not None:
            self._store = StoreTier(
                self._host,
                self.composition,
                store,
                self._stats.store,
                self._stats.header_mismatches,
                events=events,
            )
        self._copies = TierCopies(namespace, self._device, self._host, lambda: self._store, self._stats, events)
        self._admission = Admission(
            self._device, self._host, self.composition, self._copies, self._stats, prefix_caching
        )
        self._suspension = Suspension(self._device, self._host, self._copies, self._stats)

    @property
    def usable_blocks(self) -> int:
        """Blocks of the first group that L1 could hold if it held no other group's."""
        return self._pool.usable_parents * self.arena.plan.groups[0].packing

    @property
    def available_blocks(self) -> int:
        """Blocks of the first group that a request could have now if it needed no other group's."""
        return self._pool.available(0)

    @property
    def has_states(self) -> bool:
        """Whether there are recurrent states: they can be resumed at checkpoints only."""
        return bool(self._device.states)

    @property
    def changes(self) -> int:
        """Changes with every page that comes to or leaves L1 or L2: a probe of the same number finds the same."""
        host = self._host.index if self._host else self._pool
        return self._pool.changes + host.changes

    def fits(self, tokens: int, chunk: int) -> bool:
        """Whether L1 could hold a text of ``tokens`` tokens, computed ``chunk`` at a time, with all else gone."""
        return self._pool.fits(self._device.alone(tokens, chunk))

    def longest(self, chunk: int) -> int:
        """The most tokens that :meth:`fits`; 0 when not even one does."""
        low, high = 0, 1
        while high < 1 << 40 and self.fits(high, chunk):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.fits(middle, chunk) else (low, middle)
        return low

    # -- looking -----------------------------------------------------------------------------------------------

    def chain(self, token_ids: Sequence[int], salt: bytes = b"", known: Sequence[bytes] = ()) -> list[bytes]:
        """One 32-byte SHA-256 per full page of P tokens; ``known`` are leading links computed before."""
        pages = len(token_ids) // self.granularity
        if len(known) >= pages:
            return list(known[:pages])
        chain = hash_chain(token_ids, self.granularity, salt, known)
        if self._events is not None:
            first = len(known)
            parent = chain[first - 1] if first else None
            described = token_ids[first * self.granularity : pages * self.granularity]
            self._events.described(chain[first:], parent, described, salt)
        return chain

    def probe(self, chain: Sequence[bytes]) -> Probe:
        """What a request with this chain would find in L1 and L2. Changes nothing."""
        return self._admission.probe(chain)

    def start_fetch(self, chain: Sequence[bytes], tokens: int | None = None) -> Fetch | None:
        """Begin to bring the pages that L1 and L2 lack from L3 to L2; None when L3 is closed or cannot help.

        ``tokens``: how long the text is, if the chain's last page is not to be fetched when the text ends with it.
        Wait for ``fetch.done`` (it has a deadline of its own), then give it to :meth:`admit`, or to
        :meth:`drop_fetch` when the request is gone.
        """
        if self._store is None:
            return None
        links = list(chain)
        pages = len(links) if tokens is None else min(len(links), (tokens - 1) // self.granularity)
        return self._store.start_fetch(links, pages, lambda group, at: self._admission.has(links, group, at))

    @property
    def fetch_refusal(self) -> str:
        """Why the last :meth:`start_fetch` returned None: "off", a reason of L3's, or "" when nothing was missing."""
        return self._store.unread if self._store is not None else "off"

    def drop_fetch(self, fetch: Fetch) -> None:
        """Nobody waits for this fetch any more. Twice is once."""
        if self._store is not None:
            self._store.drop(fetch)

    def poll(self) -> None:
        """Take in what the L3 process finished; call it once a step, and while a fetch is waited for."""
        if self._store is not None:
            self._store.poll()
        if self._events is not None:
            self._events.flush()

    def observe_prefill(self, tokens: int, seconds: float) -> None:
        """A step computed ``tokens`` prompt tokens: what L3 is compared with."""
        if self._store is not None:
            self._store.observe_prefill(tokens, seconds)

    def fileno(self) -> int | None:
        """A descriptor that is readable when :meth:`poll` has something to do, or None without an L3 process."""
        return self._store.fileno() if self._store else None

    # -- holding -----------------------------------------------------------------------------------------------

    def admit(
        self,
        chain: Sequence[bytes],
        tokens: int,
        fetch: Fetch | None = None,
        chunk: int | None = None,
        spare: int = 0,
    ) -> Allocation | None:
        """Room for ``tokens`` tokens, the leading ones filled from L1, L2 and ``fetch``.

        At most ``tokens - 1`` tokens come from the cache: the last one is computed, for its logits. Groups with a
        window get room for ``chunk`` tokens at first (None: all), the rest comes with :meth:`extend`. ``spare``: so
        many blocks of every group are to be left to others. None, and nothing changed, when L1 has too few blocks.
        """
        allocation = self._admission.admit(chain, tokens, fetch, tokens if chunk is None else chunk, spare)
        if allocation is not None and fetch is not None:
            self.drop_fetch(fetch)
        return allocation

    def empty_l1(self) -> None:
        """Move all that nobody holds from L1 to L2, as far as L2 has room: what comes next lies together.

        The pages of a hit may be spread over so many parents, each of which they bind to their group, that a text that
        :meth:`fits` finds no room beside them. In an empty L1 it does.
        """
        self._pool.evict_idle()

    def extend(self, allocation: Allocation, tokens: int) -> bool:
        """Room to compute the tokens up to ``tokens``; False when L1 has too few blocks, and none was taken.

        Blocks that a window has passed since the last call are given back.
        """
        return tokens <= allocation.room or self._device.extend(allocation, tokens, self.prefix_caching)

    def keep_state(self, allocation: Allocation, tokens: int) -> None:
        """Keep a checkpoint of the recurrent states after ``tokens`` tokens, whole pages that are not computed yet."""
        if self._device.states and tokens > allocation.computed and tokens not in allocation.wanted:
            allocation.wanted = sorted([*allocation.wanted, tokens])
            allocation.room = min(allocation.room, tokens - 1)

    def publish(self, allocation: Allocation, chain: Sequence[bytes], computed: int) -> None:
        """The first ``computed`` tokens are in their blocks: index the full pages among them, and copy them down.

        A page that is resident already stays a private copy; the resident one is held, so that its continuation is
        never without it.
        """
        fresh, duplicates = self._device.advance(allocation, chain, computed)
        if self.prefix_caching:
            pages, more = self._device.publish(allocation, chain, computed)
            fresh, duplicates = pages + fresh, duplicates + more
        if not fresh and not duplicates:
            return
        self._stats.published_blocks += len(fresh)
        self._stats.duplicate_blocks += duplicates
        self._copies.written(fresh)

    def free(self, allocation: Allocation) -> None:
        """Let go of everything; published pages stay cached. RuntimeError when it was freed before."""
        if allocation.freed:
            raise RuntimeError("an allocation was freed twice")
        allocation.freed = True
        self._device.free(allocation)

    def flush(self, tiers: set[str]) -> dict[str, int]:
        """Forget what L1 and L2 hold, apart from pages of running requests; returns pages by tier.

        ValueError for a tier that is neither "l1" nor "l2": L3 belongs to the fleet, and the operator empties it.
        """
        if unknown := tiers - {"l1", "l2"}:
            raise ValueError(f"cannot flush {', '.join(sorted(unknown))}; choose from l1, l2")
        flushed = {}
        if "l1" in tiers:
            nodes = self._pool.clear()
            flushed["l1_blocks"] = len(nodes)
            self._stats.l1_evictions["flush"] += len(nodes)
            self._left("l1", nodes)
        if "l2" in tiers:
            # A page on its way to or from L3 keeps its slot until that is over, but is found no more.
            nodes = list(self._host.index.nodes()) if self._host else []
            for node in nodes:
                assert self._host is not None
                self._host.index.remove(node)
            flushed["l2_blocks"] = len(nodes)
            self._stats.l2_evictions["flush"] += len(nodes)
            self._left("l2", nodes)
        return flushed

    # -- swapping ----------------------------------------------------------------------------------------------

    def suspend(self, allocation: Allocation) -> Suspended | None:
        """Free an allocation whose contents L2 keeps: published pages stay pinned there, the rest is copied.

        None, and nothing changed, when L2 has no room for it: free it then, and compute it again later.
        """
        return self._suspension.suspend(allocation)

    def resume(self, suspended: Suspended, tokens: int, chunk: int | None = None, spare: int = 0) -> Allocation | None:
        """The allocation as it was, bit for bit, with room for ``tokens`` tokens in all; None, and nothing changed,
        when L1 has too few blocks. Lost when ``suspended.lost``: L2 had other bytes than it should; then drop it."""
        return self._suspension.resume(suspended, tokens, tokens if chunk is None else chunk, spare)

    def drop_suspended(self, suspended: Suspended) -> None:
        """Nobody wants it back. Twice is once."""
        self._suspension.drop(suspended)

    # -- L3 ----------------------------------------------------------------------------------------------------

    def open_store(self, namespace: str, tenant: str, master: str) -> None:
        """Begin to open L3; :meth:`store_state` tells how it goes. ValueError for a namespace not the cache's."""
        if namespace != self.namespace:
            raise ValueError(f"L3 of namespace {namespace} is not for blocks of {self.namespace}")
        if self._store is not None:
            self._store.open(namespace, tenant, master)

    def close_store(self) -> None:
        """Close L3; when this returns, this process can neither read from nor write to the store."""
        if self._store is not None:
            self._store.close()

    def store_state(self) -> StoreState:
        return self._store.state if self._store else StoreState("off")

    # -- start and end -----------------------------------------------------------------------------------------

    def restore(self) -> RestoreReport:
        """Take in what an earlier process of this namespace left in L2; before anything else."""
        if self._host is None or not self._host.retain:
            return RestoreReport()
        report = self._host.restore(self.namespace)
        if self._events is not None:
            for node in self._host.index.nodes():
                self._events.stored("l2", node.group, node.digest, "restored")
        return report

    def close(self) -> None:
        """Close L3 and give L2 back. The cache is of no use after this."""
        self.close_store()
        if self._host is not None:
            self._host.close()

    # -- counting ----------------------------------------------------------------------------------------------

    def stats(self) -> CacheStats:
        """A snapshot that later work does not change. L1's blocks are parents: with one group, its blocks."""
        stats = self._stats
        stats.l1_blocks = self._pool.usable_parents
        stats.l1_free_blocks = self._pool.free_parents
        stats.l1_evictable_blocks = self._pool.unreferenced()
        stats.l1_cached_blocks = self._pool.cached()
        stats.l1_used_blocks = self._pool.used_parents
        stats.groups = tuple(self._group_stats(number) for number in range(len(self.arena.geometry.groups)))
        stats.l1_evictions["capacity"] = self._pool.evictions
        if self._host is not None:
            stats.l2_slots = self._host.num_slots
            stats.l2_free_slots = self._host.free_slots
            stats.l2_cached_blocks = self._host.index.cached()
            stats.l2_lent_slots = self._host.lent
            stats.l2_evictions["capacity"] = self._host.index.evictions
        state = self.store_state()
        stats.store_state, stats.store_error = state.state, state.error
        if self._store is not None:
            stats.l2_quarantined_slots = self._store.quarantined_slots
            self._store.note_rates()
            stats.put_queue = self._store.queued_puts
            stats.fetches_active = self._store.active_fetches
            stats.breaker = self._store.breaker_state
            stats.client_pid = self._store.client_pid
        return snapshot(stats)

    # -- inside ------------------------------------------------------------------------------------------------

    def _group_stats(self, number: int) -> GroupStats:
        group, l1 = self.arena.geometry.groups[number], self._pool.index(number)
        l2 = self._host.index.index(number) if self._host is not None else None
        return GroupStats(
            name=group.name,
            family=group.family,
            window=group.window,
            block_tokens=group.block_tokens,
            l1_pages=len(l1),
            l1_idle_pages=l1.unreferenced,
            l2_pages=len(l2) if l2 is not None else 0,
            l2_idle_pages=l2.unreferenced if l2 is not None else 0,
        )

    def _leaves_l1(self, node: Node) -> None:
        """An L1 page's blocks are about to be reused: L2 keeps it, if it had forgotten it."""
        self._copies.spill(node)
        self._left("l1", (node,), "capacity")

    def _leaves_l2(self, node: Node) -> None:
        self._left("l2", (node,), "capacity")

    def _left(self, tier: str, nodes: Sequence[Node], reason: str = "flush") -> None:
        if self._events is not None:
            for node in nodes:
                self._events.removed(tier, node.group, node.digest, reason)  # type: ignore[arg-type]
