"""Copies between L1 and L2, their names, and who hears of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from moonpool_worker.cache.block_header import Mismatch, key_digest
from moonpool_worker.cache.device_tier import DeviceTier
from moonpool_worker.cache.events.sink import CacheEventSink
from moonpool_worker.cache.host_tier import HostTier, Page
from moonpool_worker.cache.prefix_index import Node
from moonpool_worker.cache.stats import CacheStats
from moonpool_worker.cache.store_tier.keys import store_key
from moonpool_worker.cache.store_tier.tier import StoreTier


class TierCopies:
    """``store()`` is L3 when there is one."""

    def __init__(
        self,
        namespace: str,
        device: DeviceTier,
        host: HostTier | None,
        store: Callable[[], StoreTier | None],
        stats: CacheStats,
        events: CacheEventSink | None,
    ) -> None:
        self._namespace = namespace
        self._device = device
        self._host = host
        self._store = store
        self._stats = stats
        self._events = events

    def name(self, group: int, digest: bytes) -> bytes:
        return key_digest(store_key(self._namespace, digest, group))

    def written(self, nodes: Sequence[Node]) -> None:
        """New pages in L1: copy them to L2 and queue them for L3."""
        if self._events is not None:
            for node in nodes:
                self._events.stored("l1", node.group, node.digest, "computed")
        copies = self.down(nodes)
        store = self._store()
        if store is not None:
            store.put(copies)
        for copy in copies:
            assert self._host is not None
            self._host.release(copy)

    def spill(self, node: Node) -> None:
        """A page is about to leave L1: L2 keeps it, if it had forgotten it."""
        if self._host is not None and self._host.retain:
            for copy in self.down([node]):
                self._host.release(copy)

    def down(self, nodes: Sequence[Node]) -> list[Node]:
        """L2's new copies of L1 pages, each with a reference; those it has, or has no room for, are left out."""
        host = self._host
        if host is None or (not host.retain and not self._store_is_open()):
            return []
        pages = [
            Page(node.group, node.blocks, node.digest, node.parent, node.depth, self.name(node.group, node.digest))
            for node in nodes
            if host.index.get(node.group, node.digest) is None
        ]
        if not pages:
            return []
        started = time.perf_counter()
        copies = host.store(pages)
        self._stats.l2_write_seconds += time.perf_counter() - started
        self._stats.l2_write_dropped += len(pages) - len(copies)
        self._stats.l2_write_bytes += sum(host.layout.shapes[copy.group].payload_bytes for copy in copies)
        if self._events is not None and host.retain:
            for copy in copies:
                self._events.stored("l2", copy.group, copy.digest, "copied")
        return copies

    def up(self, nodes: Sequence[Node], blocks: Sequence[tuple[int, ...]]) -> Node | None:
        """Copy pages of one group from L2 into L1 blocks; None, or the first that was not what it should be.

        That one has left L2's index; the blocks up to its own hold copies already.
        """
        host = self._host
        assert host is not None
        started = time.perf_counter()
        good, reason = host.load(nodes, blocks, [self.name(node.group, node.digest) for node in nodes])
        self._stats.l2_read_seconds += time.perf_counter() - started
        self._stats.l2_read_bytes += sum(host.layout.shapes[node.group].payload_bytes for node in nodes[:good])
        if reason is None:
            return None
        self.lost(nodes[good], reason)
        return nodes[good]

    def is_good(self, node: Node) -> bool:
        """Whether a page of L2 is what it should be; one that is not leaves the index."""
        assert self._host is not None
        reason = self._host.check(node, self.name(node.group, node.digest))
        if reason is not None:
            self.lost(node, reason)
        return reason is None

    def lost(self, node: Node, reason: Mismatch) -> None:
        """A page of L2 turned out to be another's, or damaged."""
        assert self._host is not None
        self._stats.header_mismatches[f"l2.{reason.value}"] += 1
        if node.resident:
            self._stats.l2_evictions["mismatch"] += 1
            self._host.index.remove(node)
            if self._events is not None and self._host.retain:
                self._events.removed("l2", node.group, node.digest, "mismatch")

    def arrived(self, nodes: Iterable[Node]) -> None:
        """Pages that were copied from L2 are in L1's index now."""
        if self._events is not None:
            for node in nodes:
                self._events.stored("l1", node.group, node.digest, "copied")

    def used(self, keys: Iterable[tuple[int, bytes]]) -> None:
        """A hit in L1 is a use of L2's copy too, else L2 would forget exactly what is used most."""
        if self._host is None:
            return
        found = [node for group, digest in keys if (node := self._host.index.get(group, digest)) is not None]
        for node in found:
            node.hits += 1
        self._host.index.touch(found)
        store = self._store()
        if store is not None:
            store.offer(found)

    def _store_is_open(self) -> bool:
        store = self._store()
        return store is not None and store.state.state == "open"
