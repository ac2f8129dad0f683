"""L3 with a client process that answers late, wrongly, or not at all: hits stay right, and no slot is lost."""

from __future__ import annotations

import mmap
import random

from hypothesis import event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from moonpool_worker.cache.allocation import Allocation
from moonpool_worker.cache.store_tier import messages
from moonpool_worker.cache.store_tier.fetch import Fetch
from moonpool_worker.cache.store_tier.options import StoreOptions
from moonpool_worker.cache.store_tier.tier import StoreTier

from tests.worker.cache.texts import NAMESPACE, P, compute, make_cache, wrong_pages

#: A cache group and a link.
Name = tuple[int, bytes]

OPTIONS = StoreOptions(min_pages=1, batch_pages=2, put_batch=2, put_queue=4, timeout_base=1, timeout_per_page=0)


class FakeProcess:
    """A client whose store is a dict. It writes to the arena when told to answer, as the real one might at any time."""

    pid = 4242

    def __init__(self, store: dict[Name, bytes], fd: int) -> None:
        self._store = store
        self._map = mmap.mmap(fd, 0)
        self.pending: list[messages.Request] = []
        self.replies: list[messages.Reply] = []
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

    def answer(self, pick: int, fault: int = 0) -> None:
        """Answer one request, not always the oldest; ``fault`` is a code to give instead of doing it."""
        request = self.pending.pop(pick % len(self.pending))
        codes = [0]
        match request:
            case messages.Exist():
                codes = [int(one in self._store) for one in _names(request)]
            case messages.Get():
                codes = [self._get(*one) for one in zip(_names(request), request.offsets, strict=True)]
            case messages.Put():
                codes = [self._put(*one) for one in zip(_names(request), request.offsets, request.sizes, strict=True)]
        if fault and not isinstance(request, messages.Open | messages.Close):
            codes = [fault] * len(codes)
        self.replies.append(messages.Reply(request.id, codes))

    def _get(self, name: Name, offset: int) -> int:
        data = self._store.get(name)
        if data is None:
            return -704
        self._map[offset : offset + len(data)] = data
        return len(data)

    def _put(self, name: Name, offset: int, size: int) -> int:
        self._store.setdefault(name, self._map[offset : offset + size])
        return 0


def _names(request: messages.Exist | messages.Get | messages.Put) -> list[Name]:
    return list(zip(request.groups, request.hashes, strict=True))


class StoreMachine(RuleBasedStateMachine):
    @initialize(blocks=st.integers(6, 14), slots=st.integers(2, 12))
    def start(self, blocks: int, slots: int) -> None:
        self.now = 0.0
        self.mixed_up = False
        self.objects: dict[Name, bytes] = {}
        self.processes: list[FakeProcess] = []
        self.running: list[tuple[Allocation, list[bytes]]] = []
        self.waiting: list[tuple[Fetch, list[int]]] = []
        self.cache = make_cache(blocks, slots * 4096, OPTIONS)
        host = self.cache._host
        assert host is not None
        stats = self.cache._stats
        self.cache._store = StoreTier(
            host,
            self.cache.composition,
            OPTIONS,
            stats.store,
            stats.header_mismatches,
            clock=lambda: self.now,
            spawn=self.spawn,  # type: ignore[arg-type]
        )
        self.cache.open_store(NAMESPACE, "t", "m")
        self.settle()
        # Random steps seldom fill a store: begin with a warm one and cold memory.
        for branch in (0, 1):
            self.admit(self.text([branch] * 4), None)
            self.settle()
            while self.running:
                self.finish(0)
        self.cache.flush({"l1", "l2"})

    @rule()
    def settle(self) -> None:
        """All is answered, as by a healthy store."""
        self.cache.poll()
        while self.processes[-1].pending:
            self.processes[-1].answer(0)
            self.cache.poll()

    def spawn(self, fd: int, environment: dict[str, str]) -> FakeProcess:
        self.processes.append(FakeProcess(self.objects, fd))
        return self.processes[-1]

    def text(self, branches: list[int]) -> list[int]:
        tokens: list[int] = []
        for branch in branches:
            tokens += random.Random(f"{tokens}{branch}").choices(range(50_000), k=P)
        return [*tokens, 7]

    @rule(branches=st.lists(st.just(0), min_size=1, max_size=5) | st.lists(st.integers(0, 1), min_size=1, max_size=5))
    def want(self, branches: list[int]) -> None:
        tokens = self.text(branches)
        fetch = self.cache.start_fetch(self.cache.chain(tokens))
        if fetch is None:
            self.admit(tokens, None)
        else:
            self.waiting.append((fetch, tokens))

    @precondition(lambda self: self.waiting)
    @rule(pick=st.integers(0, 9), give_up=st.booleans())
    def go_on(self, pick: int, give_up: bool) -> None:
        fetch, tokens = self.waiting.pop(pick % len(self.waiting))
        if give_up:
            self.cache.drop_fetch(fetch)
        else:
            self.admit(tokens, fetch)

    def admit(self, tokens: list[int], fetch: Fetch | None) -> None:
        chain = self.cache.chain(tokens)
        allocation = self.cache.admit(chain, len(tokens), fetch)
        if allocation is None:
            if fetch is not None:
                self.cache.drop_fetch(fetch)
            return
        assert not wrong_pages(self.cache, allocation, chain, allocation.cached_tokens // P)
        compute(self.cache, allocation, chain)
        self.cache.publish(allocation, chain, len(tokens))
        self.running.append((allocation, chain))

    @precondition(lambda self: self.running)
    @rule(pick=st.integers(0, 9))
    def finish(self, pick: int) -> None:
        allocation, chain = self.running.pop(pick % len(self.running))
        assert not wrong_pages(self.cache, allocation, chain, len(chain))
        self.cache.free(allocation)

    @rule(pick=st.integers(0, 9), fault=st.sampled_from([0, 0, 0, -800, -1700, -1701]), count=st.integers(1, 4))
    def answer(self, pick: int, fault: int, count: int) -> None:
        for _ in range(count):
            if self.processes[-1].pending:
                self.processes[-1].answer(pick, fault)
        self.cache.poll()

    @rule(seconds=st.sampled_from([0.0, 0.6, 2.0, 20.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.cache.poll()
        for fetch, _ in self.waiting:
            assert fetch.done or fetch.deadline > self.now

    @precondition(lambda self: self.waiting)
    @rule(late=st.booleans())
    def a_read_is_still_under_way_at_the_deadline(self, late: bool) -> None:
        """The slots are the process's until it answers, which it does after others wanted room in L2."""
        self.answer_only(messages.Exist)
        self.now += 1.5
        self.cache.poll()
        self.admit(self.text([1, 1, 0, 1]), None)
        while self.running:
            self.finish(0)
        if late:
            self.answer_only(messages.Get)
        self.cache.flush({"l1"})
        self.admit(self.text([1, 1, 0, 1]), None)

    def answer_only(self, kind: type) -> None:
        for _ in range(4):
            process = self.processes[-1]
            picks = [i for i, request in enumerate(process.pending) if isinstance(request, kind)]
            if picks:
                process.answer(picks[0])
            self.cache.poll()

    @rule(back=st.booleans())
    def the_process_dies(self, back: bool) -> None:
        self.processes[-1].alive = False
        self.cache.poll()
        if back:
            self.time_passes(20.0)
            self.settle()

    @rule(branches=st.lists(st.just(0), min_size=1, max_size=5))
    def read_cold(self, branches: list[int]) -> None:
        """A healthy read from L3, so that long sequences keep doing real work."""
        self.cache.flush({"l1", "l2"})
        self.want(branches)
        self.settle()
        if self.waiting:
            self.go_on(-1, False)

    @rule(pick=st.integers(0, 9))
    def the_store_mixes_up_two_objects(self, pick: int) -> None:
        names = list(self.objects)
        if len(names) > 1:
            self.mixed_up = True
            a, b = names[pick % len(names)], names[(pick + 1) % len(names)]
            self.objects[a], self.objects[b] = self.objects[b], self.objects[a]

    @rule(tiers=st.sets(st.sampled_from(["l1", "l2"])))
    def flush(self, tiers: set[str]) -> None:
        self.cache.flush(tiers)

    @rule(tenant=st.sampled_from(["t", "u"]))
    def reopen(self, tenant: str) -> None:
        self.cache.close_store()
        assert not self.processes[-1].alive
        self.cache.open_store(NAMESPACE, tenant, "m")
        self.settle()

    @invariant()
    def only_one_process_lives(self) -> None:
        assert all(not process.alive for process in getattr(self, "processes", [])[:-1])

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        for fetch, _ in self.waiting:
            self.cache.drop_fetch(fetch)
        for allocation, _ in self.running:
            self.cache.free(allocation)
        self.cache.close_store()
        stats = self.cache.stats()
        assert self.cache.available_blocks == self.cache.usable_blocks
        assert stats.l2_lent_slots == 0
        assert stats.l2_free_slots + stats.l2_cached_blocks == stats.l2_slots
        # The header would hide a slot that was written to by two; here it must have had nothing to hide.
        assert not [reason for reason in stats.header_mismatches if reason.startswith("l2.")]
        assert self.mixed_up or not stats.header_mismatches
        seen = f"l3 hits {stats.hit_tokens.l3 > 0}, refused {bool(stats.header_mismatches)}"
        event(f"{seen}, late {stats.store.late_blocks > 0}, deadline {stats.store.fetches['deadline'] > 0}")
        host = self.cache._host
        assert host is not None
        assert all(node.refs == 0 for node in host.index.nodes())
        self.cache.close()


StoreMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
TestStoreMachine = StoreMachine.TestCase
