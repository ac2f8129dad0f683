"""A store that is a dict, and an L3 client process that answers it when, and as, a test says."""

from __future__ import annotations

import mmap

from moonpool_worker.cache.kv_cache import KVCache
from moonpool_worker.cache.store_tier import messages
from moonpool_worker.cache.store_tier.options import StoreOptions
from moonpool_worker.cache.store_tier.tier import StoreTier

#: A cache group and a link of the hash chain.
Name = tuple[int, bytes]
NAMESPACE = "a" * 64


class FakeProcess:
    """It writes to the arena when told to answer, as the real one might at any time."""

    pid = 4242

    def __init__(self, store: dict[Name, bytes], fd: int, measured: tuple[int, int] | None = None) -> None:
        self._store = store
        self._map = mmap.mmap(fd, 0)
        self._measured = measured
        self.pending: list[messages.Request] = []
        self.replies: list[messages.Reply] = []
        self.read: list[Name] = []
        self.alive = True

    def fileno(self) -> int:
        return -1

    def send(self, request: messages.Request) -> None:
        self.pending.append(request)

    def receive(self) -> tuple[list[messages.Reply], bool]:
        replies, self.replies = self.replies, []
        return replies, self.alive

    def wait_readable(self, seconds: float) -> None:
        while self.pending:
            self.answer(0)

    def wait_exit(self, seconds: float) -> int:
        return 0

    def kill(self) -> int:
        self.pending = []
        self.alive = False
        return -9

    def answer(self, pick: int = 0, fault: int = 0) -> None:
        """Answer one request, not always the oldest; ``fault`` is a code to give instead of doing it."""
        request = self.pending.pop(pick % len(self.pending))
        codes = [0]
        match request:
            case messages.Measure():
                codes = [0, *(self._measured or ())]
            case messages.Exist():
                codes = [int(one in self._store) for one in names(request)]
            case messages.Get():
                codes = [self._get(*one) for one in zip(names(request), request.offsets, strict=True)]
            case messages.Put():
                codes = [self._put(*one) for one in zip(names(request), request.offsets, request.sizes, strict=True)]
        if fault and not isinstance(request, messages.Open | messages.Close):
            codes = [fault] * len(codes)
        self.replies.append(messages.Reply(request.id, codes, 0.001))

    def _get(self, name: Name, offset: int) -> int:
        data = self._store.get(name)
        if data is None:
            return -704
        self.read.append(name)
        self._map[offset : offset + len(data)] = data
        return len(data)

    def _put(self, name: Name, offset: int, size: int) -> int:
        self._store.setdefault(name, self._map[offset : offset + size])
        return 0


def names(request: messages.Exist | messages.Get | messages.Put) -> list[Name]:
    return list(zip(request.groups, request.hashes, strict=True))


class FakeL3:
    """Puts an L3 with fake processes and a clock of the test's own under a cache.

    ``measured``: microseconds of a call and of a read, as the store is measured; None for not at all.
    """

    def __init__(
        self,
        cache: KVCache,
        options: StoreOptions,
        objects: dict[Name, bytes] | None = None,
        measured: tuple[int, int] | None = None,
    ) -> None:
        self.now = 0.0
        self.cache = cache
        self.objects = {} if objects is None else objects
        self.measured = measured
        self.processes: list[FakeProcess] = []
        host, stats = cache._host, cache._stats
        assert host is not None
        cache._store = StoreTier(
            host,
            cache.composition,
            options,
            stats.store,
            stats.header_mismatches,
            clock=lambda: self.now,
            spawn=self._spawn,  # type: ignore[arg-type]
        )

    @property
    def process(self) -> FakeProcess:
        return self.processes[-1]

    def open(self) -> None:
        self.cache.open_store(NAMESPACE, "t", "m")
        self.settle()

    def settle(self) -> None:
        """All is answered, as by a healthy store."""
        self.cache.poll()
        while self.process.pending:
            self.process.answer()
            self.cache.poll()

    def _spawn(self, fd: int, environment: dict[str, str]) -> FakeProcess:
        self.processes.append(FakeProcess(self.objects, fd, self.measured))
        return self.process
