"""L3 with a client process that answers late, wrongly, or not at all: hits stay right, and no slot is lost."""

from __future__ import annotations

import random

import pytest
from hypothesis import event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from moonpool_api.geometry import GroupGeometry
from moonpool_worker.cache.kv_cache import KVCache
from moonpool_worker.cache.store_tier import messages
from moonpool_worker.cache.store_tier.fetch import Fetch
from moonpool_worker.cache.store_tier.options import StoreOptions

from tests.worker.cache.fake_store import NAMESPACE, FakeL3, Name
from tests.worker.cache.groups_machine import GROUPS
from tests.worker.cache.imagined_model import P, Text, audit, begin, cache_of, private_blocks

pytestmark = pytest.mark.property

OPTIONS = StoreOptions(min_pages=1, batch_pages=2, put_batch=2, put_queue=32, timeout_base=2, timeout_per_page=0)


class StoreMachine(RuleBasedStateMachine):
    """Texts are paths in a tree of two branches a page; the imagined model checks all that they read."""

    @initialize(groups=st.sampled_from(GROUPS), parents=st.integers(6, 14), l2_parents=st.integers(3, 12))
    def start(self, groups: tuple[GroupGeometry, ...], parents: int, l2_parents: int) -> None:
        self.mixed_up = False
        self.running: list[Text] = []
        self.waiting: list[tuple[Fetch, list[int]]] = []
        big = cache_of(*groups, parents=100, l2_bytes=1 << 20, l2_alignment=64)
        assert big._host is not None
        size = len(groups) * l2_parents * big._host.layout.parent_bytes
        self.cache = cache_of(*groups, parents=len(groups) * parents, l2_bytes=size, l2_alignment=64)
        self.l3 = FakeL3(self.cache, OPTIONS, self._warm(big))
        self.l3.open()

    def _warm(self, writer: KVCache) -> dict[Name, bytes]:
        """Random steps seldom fill a store: begin with what a larger worker wrote."""
        other = FakeL3(writer, OPTIONS)
        other.open()
        for branch in (0, 1):
            tokens = self.text([branch] * 5)
            text = begin(writer, tokens)
            assert text is not None
            # A page at a time, so that every one has its checkpoint.
            for end in range(P, len(tokens) + P, P):
                assert text.chunk(min(end, len(tokens)))
                other.settle()
            writer.free(text.allocation)
        writer.close()
        return other.objects

    @rule()
    def settle(self) -> None:
        """All is answered, as by a healthy store."""
        self.l3.settle()

    def text(self, branches: list[int]) -> list[int]:
        tokens: list[int] = []
        for branch in branches:
            tokens += random.Random(f"{tokens}{branch}").choices(range(50_000), k=P)
        return [*tokens, 7]

    @rule(branches=st.lists(st.just(0), min_size=1, max_size=5) | st.lists(st.integers(0, 1), min_size=1, max_size=5))
    def want(self, branches: list[int]) -> None:
        tokens = self.text(branches)
        fetch = self.cache.start_fetch(self.cache.chain(tokens), len(tokens))
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
        text = Text(self.cache, tokens, allocation, chain)
        text.check()
        self.running.append(text)
        text.chunk(len(tokens))

    @precondition(lambda self: self.running)
    @rule(pick=st.integers(0, 9))
    def finish(self, pick: int) -> None:
        text = self.running.pop(pick % len(self.running))
        text.check()
        self.cache.free(text.allocation)

    @rule(pick=st.integers(0, 9), fault=st.sampled_from([0, 0, 0, -800, -1700, -1701]), count=st.integers(1, 4))
    def answer(self, pick: int, fault: int, count: int) -> None:
        for _ in range(count):
            if self.l3.process.pending:
                self.l3.process.answer(pick, fault)
        self.cache.poll()

    @rule(seconds=st.sampled_from([0.0, 0.6, 2.0, 20.0]))
    def time_passes(self, seconds: float) -> None:
        self.l3.now += seconds
        self.cache.poll()
        for fetch, _ in self.waiting:
            assert fetch.done or fetch.deadline > self.l3.now

    @precondition(lambda self: self.waiting)
    @rule(late=st.booleans())
    def a_read_is_still_under_way_at_the_deadline(self, late: bool) -> None:
        """The slots are the process's until it answers, which it does after others wanted room in L2."""
        self.answer_only(messages.Exist)
        self.l3.now += 2.5
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
            process = self.l3.process
            picks = [i for i, request in enumerate(process.pending) if isinstance(request, kind)]
            if picks:
                process.answer(picks[0])
            self.cache.poll()

    @rule(back=st.booleans())
    def the_process_dies(self, back: bool) -> None:
        self.l3.process.alive = False
        self.cache.poll()
        if back:
            self.time_passes(20.0)
            self.l3.settle()

    @rule(branches=st.lists(st.just(0), min_size=1, max_size=5))
    def read_cold(self, branches: list[int]) -> None:
        """A healthy read from L3, so that long sequences keep doing real work."""
        self.cache.flush({"l1", "l2"})
        self.want(branches)
        self.l3.settle()
        if self.waiting:
            self.go_on(-1, False)

    @rule(pick=st.integers(0, 9))
    def the_store_mixes_up_two_objects(self, pick: int) -> None:
        names = list(self.l3.objects)
        if len(names) > 1:
            self.mixed_up = True
            a, b = names[pick % len(names)], names[(pick + 1) % len(names)]
            self.l3.objects[a], self.l3.objects[b] = self.l3.objects[b], self.l3.objects[a]

    @rule(tiers=st.sets(st.sampled_from(["l1", "l2"])))
    def flush(self, tiers: set[str]) -> None:
        self.cache.flush(tiers)

    @rule(tenant=st.sampled_from(["t", "u"]))
    def reopen(self, tenant: str) -> None:
        self.cache.close_store()
        assert not self.l3.process.alive
        self.cache.open_store(NAMESPACE, tenant, "m")
        self.l3.settle()

    @invariant()
    def only_one_process_lives(self) -> None:
        if hasattr(self, "l3"):
            assert all(not process.alive for process in self.l3.processes[:-1])

    @invariant()
    def every_block_has_one_owner(self) -> None:
        if hasattr(self, "l3"):
            audit(self.cache._pool, private_blocks(self.cache, [text.allocation for text in self.running]))

    def teardown(self) -> None:
        if not hasattr(self, "l3"):
            return
        for fetch, _ in self.waiting:
            self.cache.drop_fetch(fetch)
        for text in self.running:
            self.cache.free(text.allocation)
        self.cache.close_store()
        stats = self.cache.stats()
        assert self.cache.available_blocks == self.cache.usable_blocks
        assert stats.l2_lent_slots == 0
        assert self.cache._host is not None
        audit(self.cache._host.index, [])
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
