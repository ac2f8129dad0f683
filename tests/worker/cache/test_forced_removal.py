"""Mooncake hands out other objects' bytes as read when objects are removed by force under readers: none is accepted.

One thread removes the namespace's blocks by force, one writes them again, all of one size, and readers read all the
time. ``serve`` compares every cached byte with what the model would have computed. What Mooncake gave back as read and
was another block shows as a header mismatch.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable

import pytest
from moonpool_worker.cache.block_header import Mismatch, read_identity, verify
from moonpool_worker.cache.host_tier import HostTier
from moonpool_worker.cache.kv_cache import KVCache
from moonpool_worker.cache.prefix_index import Node
from moonpool_worker.cache.store_tier.options import StoreOptions

from tests.mooncake_fixture import MiB, RunningMooncake, available, running_mooncake
from tests.worker.cache.texts import MEGABYTE, make_cache, poll_until, serve, text

pytestmark = [pytest.mark.mooncake, pytest.mark.skipif(not available(), reason="Mooncake is not installed")]

TENANT = "churn"
TEXTS = [text(10, seed=100 + number, granularity=32) for number in range(3)]
READERS = 2
#: Until enough wrong blocks were offered to prove something, but no longer than the last.
SECONDS, ENOUGH, LIMIT = 5.0, 3, 60.0
#: The test wants reads, whether or not they pay.
OPTIONS = StoreOptions(always=True, timeout_base=5, negative_ttl=0.01, refused_put_pause=0.05)


class Refusals:
    """Counts what ``adopt`` refused, and what a header without the key's digest would have let through.

    Those are whole blocks, their checksum right, of the same namespace and size: everything but the one asked for.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.refused: Counter[str] = Counter()
        self.whole_but_another = 0
        adopt = HostTier.adopt

        def watched(
            host: HostTier, group: int, slot: int, digest: bytes, parent: bytes | None, depth: int, name: bytes
        ) -> Node | Mismatch:
            adopted = adopt(host, group, slot, digest, parent, depth, name)
            if isinstance(adopted, Mismatch):
                self.refused[adopted.value] += 1
                memory = host.slot(group, slot)
                identity = read_identity(memory)
                if adopted is Mismatch.KEY and identity is not None:
                    payload = host.object_bytes(group) - 128
                    self.whole_but_another += verify(memory, identity.name, payload) is None
            return adopted

        monkeypatch.setattr(HostTier, "adopt", watched)


class Churn:
    """The threads: each ends by itself at ``end``, and what it raised is kept."""

    def __init__(self, mooncake: RunningMooncake, done: Callable[[], bool]) -> None:
        self._mooncake = mooncake
        self._done = done
        self.failures: list[BaseException] = []
        self.reads = self.blocks = 0

    def run(self, writer: KVCache, readers: list[KVCache]) -> None:
        works: list[Callable[[], None]] = [self._remove, lambda: self._write(writer)]
        works += [lambda reader=reader: self._read(reader) for reader in readers]  # type: ignore[misc]
        threads = [threading.Thread(target=self._guarded, args=(work,)) for work in works]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            while not self._done() and not self.failures:
                work()
        except BaseException as failure:
            self.failures.append(failure)

    def _remove(self) -> None:
        self._mooncake.remove_all(TENANT)
        time.sleep(0.02)

    def _write(self, cache: KVCache) -> None:
        for one in TEXTS:
            cache.flush({"l1", "l2"})
            serve(cache, one)
            poll_until(cache, lambda: cache.stats().put_queue == 0)

    def _read(self, cache: KVCache) -> None:
        for one in TEXTS:
            self.blocks += serve(cache, one, fetch=True).cached.l3 // 32
            self.reads += 1
            cache.flush({"l1", "l2"})


def test_no_wrong_block_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    refusals = Refusals(monkeypatch)
    sizes = {"geometry": MEGABYTE, "blocks": 60, "l2_bytes": 24 << 20, "store": OPTIONS}
    with running_mooncake({TENANT: 40 * MiB}) as mooncake:
        caches = [make_cache(**sizes) for _ in range(1 + READERS)]  # type: ignore[arg-type]
        for cache in caches:
            cache.open_store(cache.namespace, TENANT, mooncake.master)
            poll_until(cache, lambda cache=cache: cache.store_state().state == "open", 30)  # type: ignore[misc]
        for one in TEXTS:
            serve(caches[0], one)  # computes the expected bytes, once
        started = time.monotonic()

        def done() -> bool:
            passed = time.monotonic() - started
            return passed > LIMIT or (passed > SECONDS and refusals.whole_but_another >= ENOUGH)

        churn = Churn(mooncake, done)
        churn.run(caches[0], caches[1:])
        for cache in caches:
            cache.close()
    print(
        f"{churn.reads} reads, {churn.blocks} blocks accepted and right, refused: {dict(refusals.refused)}, of which "
        f"{refusals.whole_but_another} whole blocks of another key; {time.monotonic() - started:.0f} s"
    )
    assert not churn.failures
    assert churn.blocks > 0
    assert refusals.refused.total() > 0
    # Without the key's digest in the header these would have been served as the text that was asked for.
    assert refusals.whole_but_another > 0
