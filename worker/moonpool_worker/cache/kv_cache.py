"""The one door to the three tiers of cached KV. All calls come from the engine's thread, and none of them blocks.

Only :meth:`KVCache.close_store` and :meth:`KVCache.close` wait, for the L3 process to be gone, up to a deadline.
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Sequence

from moonpool_worker.cache.allocation import Allocation, Probe
from moonpool_worker.cache.block_header import key_digest
from moonpool_worker.cache.block_pool import BlockPool
from moonpool_worker.cache.device_arena import DeviceArena
from moonpool_worker.cache.hash_chain import hash_chain
from moonpool_worker.cache.host_tier import HostTier, Page
from moonpool_worker.cache.prefix_index import Node
from moonpool_worker.cache.stats import CacheStats, TierTokens
from moonpool_worker.cache.store_tier.fetch import Fetch
from moonpool_worker.cache.store_tier.keys import store_key
from moonpool_worker.cache.store_tier.options import StoreOptions
from moonpool_worker.cache.store_tier.tier import StoreState, StoreTier


class KVCache:
    """L1 blocks of ``arena``, ``l2_bytes`` of host memory (0: off), and L3 when ``store`` is given.

    ``namespace`` (64 hex digits) names every block in L2 and L3. Published blocks are copied to L2 at once and queued
    for L3; a block evicted from L1 is still in L2. With ``prefix_caching`` off nothing is ever published or found.
    """

    def __init__(
        self,
        arena: DeviceArena,
        namespace: str,
        l2_bytes: int = 0,
        store: StoreOptions | None = None,
        prefix_caching: bool = True,
    ) -> None:
        self.arena = arena
        self.namespace = namespace
        self.granularity = arena.geometry.prefix_granularity
        self.prefix_caching = prefix_caching
        self._stats = CacheStats()
        self._pool = BlockPool(arena.blocks(0), self._spill)
        self._host: HostTier | None = None
        self._store: StoreTier | None = None
        if not prefix_caching:
            return
        if l2_bytes:
            self._host = HostTier(arena, l2_bytes)
        elif store is not None:
            self._host = HostTier(arena, store.staging_bytes, retain=False)
        if store is not None:
            assert self._host is not None
            self._store = StoreTier(self._host, store, self._stats.store, self._stats.header_mismatches)

    @property
    def usable_blocks(self) -> int:
        """L1 blocks that requests can have; a request that needs more can never be admitted."""
        return self._pool.usable_blocks

    @property
    def available_blocks(self) -> int:
        """L1 blocks that a request could have now."""
        return self._pool.available

    # -- looking -----------------------------------------------------------------------------------------------

    def chain(self, token_ids: Sequence[int], salt: bytes = b"", known: Sequence[bytes] = ()) -> list[bytes]:
        """One 32-byte SHA-256 per full page of P tokens; ``known`` are leading links computed before."""
        return hash_chain(token_ids, self.granularity, salt, known)

    def probe(self, chain: Sequence[bytes]) -> Probe:
        """What a request with this chain would find in L1 and L2. Changes nothing."""
        if not self.prefix_caching:
            return Probe(0, 0, self.granularity)
        l1 = len(self._pool.index.match(chain))
        l2 = len(self._host.index.match(chain, l1)) if self._host else 0
        return Probe(l1, l2, self.granularity)

    def start_fetch(self, chain: Sequence[bytes]) -> Fetch | None:
        """Begin to bring the pages that L1 and L2 lack from L3 to L2; None when L3 is closed or cannot help.

        Wait for ``fetch.done`` (it has a deadline of its own), then give it to :meth:`admit`, or to
        :meth:`drop_fetch` when the request is gone.
        """
        if self._store is None:
            return None
        return self._store.start_fetch(list(chain), self.probe(chain).blocks)

    def drop_fetch(self, fetch: Fetch) -> None:
        """Nobody waits for this fetch any more. Twice is once."""
        if self._store is not None:
            self._store.drop(fetch)

    def poll(self) -> None:
        """Take in what the L3 process finished; call it once a step, and while a fetch is waited for."""
        if self._store is not None:
            self._store.poll()

    def fileno(self) -> int | None:
        """A descriptor that is readable when :meth:`poll` has something to do, or None without an L3 process."""
        return self._store.fileno() if self._store else None

    # -- holding -----------------------------------------------------------------------------------------------

    def admit(self, chain: Sequence[bytes], tokens: int, fetch: Fetch | None = None) -> Allocation | None:
        """Blocks for ``tokens`` tokens, the leading ones filled from L1, L2 and ``fetch``.

        At most ``tokens - 1`` tokens come from the cache: the last one is computed, for its logits. None, and nothing
        changed, when L1 has too few blocks.
        """
        if tokens < 1:
            raise ValueError(f"a request has at least one token, got {tokens}")
        total = self._blocks_for(tokens)
        limit = min(len(chain), (tokens - 1) // self.granularity) if self.prefix_caching else 0
        hits = self._pool.index.match(chain, stop=limit)
        idle_hits = sum(node.refs == 0 for node in hits)
        if total - len(hits) > self._pool.available - idle_hits:
            self._stats.refused += 1
            return None
        copies = self._host.index.match(chain, len(hits), limit) if self._host else []
        for node in hits:
            self._pool.index.ref(node)
        if self._host:
            # Taking blocks may evict from L1, which spills to L2: what is about to be read must stay.
            for node in copies:
                self._host.index.ref(node)
        after = hits[-1].slot if hits else None
        fresh = self._pool.take(total - len(hits), after)
        nodes = list(hits)
        l3 = self._copy_up(copies, fresh, nodes, fetch)
        self._pool.index.touch(nodes)
        self._touch_l2(chain[: len(nodes)])
        if fetch is not None:
            self.drop_fetch(fetch)
        cached = TierTokens(
            l1=len(hits) * self.granularity,
            l2=(len(nodes) - len(hits) - l3) * self.granularity,
            l3=l3 * self.granularity,
        )
        self._count_admission(tokens, cached)
        return Allocation([node.slot for node in hits] + fresh, cached.total, cached, nodes)

    def extend(self, allocation: Allocation, tokens: int) -> bool:
        """Room for ``tokens`` tokens in all; False, and nothing changed, when L1 has too few blocks."""
        missing = self._blocks_for(tokens) - len(allocation.block_ids)
        if missing <= 0:
            return True
        if missing > self._pool.available:
            return False
        allocation.block_ids += self._pool.take(missing, allocation.block_ids[-1])
        return True

    def publish(self, allocation: Allocation, chain: Sequence[bytes], computed: int) -> None:
        """The first ``computed`` tokens are in their blocks: index the full pages among them, and copy them down.

        A page that is resident already stays a private copy; the resident one is held, so that its continuation is
        never without it.
        """
        if not self.prefix_caching:
            return
        fresh = []
        for page in range(allocation.published, min(computed // self.granularity, len(chain))):
            digest = chain[page]
            node = self._pool.index.get(digest)
            if node is None:
                parent = chain[page - 1] if page else None
                node = self._pool.index.insert(digest, parent, allocation.block_ids[page], refs=1)
                fresh.append(node)
            else:
                self._pool.index.ref(node)
                self._stats.duplicate_blocks += 1
            allocation.nodes.append(node)
        self._stats.published_blocks += len(fresh)
        self._write_through(fresh)

    def free(self, allocation: Allocation) -> None:
        """Let go of everything; published pages stay cached. RuntimeError when it was freed before."""
        if allocation.freed:
            raise RuntimeError("an allocation was freed twice")
        allocation.freed = True
        published = allocation.published
        self._pool.index.touch(allocation.nodes)
        for node, block in zip(allocation.nodes, allocation.block_ids, strict=False):
            if node.slot != block:
                self._pool.give((block,))
        for node in reversed(allocation.nodes):
            self._pool.index.unref(node)
        self._pool.give(allocation.block_ids[published:])
        allocation.block_ids, allocation.nodes = [], []

    def flush(self, tiers: set[str]) -> dict[str, int]:
        """Forget what L1 and L2 hold, apart from blocks of running requests; returns blocks by tier.

        ValueError for a tier that is neither "l1" nor "l2": L3 belongs to the fleet, and the operator empties it.
        """
        if unknown := tiers - {"l1", "l2"}:
            raise ValueError(f"cannot flush {', '.join(sorted(unknown))}; choose from l1, l2")
        flushed = {}
        if "l1" in tiers:
            flushed["l1_blocks"] = self._pool.index.clear()
            self._stats.l1_evictions["flush"] += flushed["l1_blocks"]
        if "l2" in tiers:
            nodes = list(self._host.index.nodes()) if self._host else []
            for node in nodes:
                # A block on its way to or from L3 keeps its slot until that is over, but is found no more.
                assert self._host is not None
                self._host.index.remove(node)
            flushed["l2_blocks"] = len(nodes)
            self._stats.l2_evictions["flush"] += len(nodes)
        return flushed

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

    def close(self) -> None:
        """Close L3 and give L2 back. The cache is of no use after this."""
        self.close_store()
        if self._host is not None:
            self._host.close()

    # -- counting ----------------------------------------------------------------------------------------------

    def stats(self) -> CacheStats:
        """A snapshot that later work does not change."""
        stats = self._stats
        stats.l1_blocks = self._pool.usable_blocks
        stats.l1_free_blocks = self._pool.free_blocks
        stats.l1_evictable_blocks = self._pool.index.unreferenced
        stats.l1_cached_blocks = len(self._pool.index)
        stats.l1_evictions["capacity"] = self._pool.evictions
        if self._host is not None:
            stats.l2_slots = self._host.num_slots
            stats.l2_free_slots = self._host.free_slots
            stats.l2_cached_blocks = len(self._host.index)
            stats.l2_lent_slots = self._host.lent
            stats.l2_evictions["capacity"] = self._host.evictions
        state = self.store_state()
        stats.store_state, stats.store_error = state.state, state.error
        if self._store is not None:
            stats.l2_quarantined_slots = self._store.quarantined_slots
            stats.put_queue = self._store.queued_puts
            stats.fetches_active = self._store.active_fetches
            stats.breaker = self._store.breaker_state
            stats.client_pid = self._store.client_pid
        return _snapshot(stats)

    # -- inside ------------------------------------------------------------------------------------------------

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.granularity)

    def _name(self, digest: bytes) -> bytes:
        return key_digest(store_key(self.namespace, digest))

    def _copy_up(self, copies: list[Node], fresh: list[int], nodes: list[Node], fetch: Fetch | None) -> int:
        """Copy L2 nodes to the first of the fresh blocks and index them; returns how many ``fetch`` had brought."""
        if not copies:
            return 0
        host = self._host
        assert host is not None
        started = time.perf_counter()
        blocks = fresh[: len(copies)]
        names = [self._name(source.digest) for source in copies]
        good, reason = host.load([source.slot for source in copies], blocks, names)
        for source, block in zip(copies[:good], blocks, strict=False):
            nodes.append(self._pool.index.insert(source.digest, source.parent, block, refs=1))
        if reason is not None:
            # A miss from here on: what continues a bad page is of no use to this request.
            self._stats.header_mismatches[f"l2.{reason.value}"] += 1
            self._stats.l2_evictions["mismatch"] += 1
            host.index.remove(copies[good])
        for source in copies:
            host.release(source)
        self._stats.l2_read_bytes += good * host.payload_bytes
        self._stats.l2_read_seconds += time.perf_counter() - started
        return sum(source.digest in fetch.fetched for source in copies[:good]) if fetch is not None else 0

    def _touch_l2(self, digests: Sequence[bytes]) -> None:
        """A hit in L1 is a use of L2's copy too, else L2 would forget exactly what is used most."""
        if self._host is None:
            return
        found = [node for digest in digests if (node := self._host.index.get(digest)) is not None]
        self._host.index.touch(found)
        if self._store is not None:
            self._store.offer(found)

    def _write_through(self, nodes: list[Node]) -> None:
        """Copy newly published L1 blocks to L2 and queue them for L3."""
        copies = self._copy_down(nodes)
        if self._store is not None:
            self._store.put(copies)
        for copy in copies:
            assert self._host is not None
            self._host.release(copy)

    def _spill(self, node: Node) -> None:
        """An L1 block is about to be reused: L2 keeps it, if it had forgotten it."""
        if self._host is not None and self._host.retain:
            for copy in self._copy_down([node]):
                self._host.release(copy)

    def _copy_down(self, nodes: list[Node]) -> list[Node]:
        """L2's new copies of L1 blocks, each with a reference; those it has, or has no room for, are left out."""
        host = self._host
        if host is None or (not host.retain and self.store_state().state != "open"):
            return []
        pages = [
            Page(node.slot, node.digest, node.parent, self._name(node.digest))
            for node in nodes
            if host.index.get(node.digest) is None
        ]
        if not pages:
            return []
        started = time.perf_counter()
        copies = host.store(pages)
        self._stats.l2_write_seconds += time.perf_counter() - started
        self._stats.l2_write_dropped += len(pages) - len(copies)
        self._stats.l2_write_bytes += len(copies) * host.payload_bytes
        return copies

    def _count_admission(self, tokens: int, cached: TierTokens) -> None:
        stats = self._stats
        stats.admitted += 1
        stats.prompt_tokens += tokens
        stats.hit_tokens.l1 += cached.l1
        stats.hit_tokens.l2 += cached.l2
        stats.hit_tokens.l3 += cached.l3
        stats.miss_tokens += tokens - cached.total


def _snapshot(stats: CacheStats) -> CacheStats:
    copy = dataclasses.replace(
        stats, hit_tokens=dataclasses.replace(stats.hit_tokens), store=dataclasses.replace(stats.store)
    )
    for holder, source in ((copy, stats), (copy.store, stats.store)):
        for each in dataclasses.fields(source):
            value = getattr(source, each.name)
            if isinstance(value, Counter):
                setattr(holder, each.name, Counter(value))
    return copy
