"""After any sequence of calls: a reported hit holds the bytes that were computed, and nothing is leaked."""

from __future__ import annotations

import random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from moonpool_worker.cache.allocation import Allocation

from tests.worker.cache.texts import P, compute, make_cache, wrong_pages

PAGES = st.integers(0, 6)


class CacheMachine(RuleBasedStateMachine):
    """Texts are paths in a tree of few branches, so that they share prefixes often."""

    @initialize(blocks=st.integers(4, 14), slots=st.integers(0, 12))
    def start(self, blocks: int, slots: int) -> None:
        self.cache = make_cache(blocks, l2_bytes=slots * 4096)
        self.running: list[tuple[Allocation, list[bytes], int]] = []

    def text(self, branches: list[int], extra: int) -> list[int]:
        tokens: list[int] = []
        for branch in branches:
            tokens += random.Random(f"{tokens}{branch}").choices(range(50_000), k=P)
        return tokens + [7] * extra

    @rule(branches=st.lists(st.integers(0, 1), max_size=6), extra=st.integers(1, P))
    def admit(self, branches: list[int], extra: int) -> None:
        tokens = self.text(branches, extra)
        chain = self.cache.chain(tokens)
        seen = self.cache.probe(chain)
        room = self.cache.available_blocks
        allocation = self.cache.admit(chain, len(tokens))
        if allocation is None:
            assert self.cache.available_blocks == room
            assert self.cache.probe(chain) == seen
            return
        pages = allocation.cached_tokens // P
        assert pages == min(seen.blocks, (len(tokens) - 1) // P)
        assert not wrong_pages(self.cache, allocation, chain, pages)
        compute(self.cache, allocation, chain)
        self.running.append((allocation, chain, len(tokens)))

    @precondition(lambda self: self.running)
    @rule(pick=st.integers(0, 99), part=st.integers(0, 30))
    def publish(self, pick: int, part: int) -> None:
        allocation, chain, tokens = self.running[pick % len(self.running)]
        self.cache.publish(allocation, chain, max(allocation.cached_tokens, min(part, tokens)))

    @precondition(lambda self: self.running)
    @rule(pick=st.integers(0, 99), more=st.integers(0, 3 * P))
    def extend(self, pick: int, more: int) -> None:
        allocation, _, tokens = self.running[pick % len(self.running)]
        blocks = list(allocation.block_ids)
        grown = self.cache.extend(allocation, tokens + more)
        assert allocation.block_ids[: len(blocks)] == blocks
        assert grown or allocation.block_ids == blocks

    @precondition(lambda self: self.running)
    @rule(pick=st.integers(0, 99))
    def free(self, pick: int) -> None:
        allocation, chain, _ = self.running.pop(pick % len(self.running))
        # Nobody else wrote into the blocks of a running request.
        assert not wrong_pages(self.cache, allocation, chain, len(chain))
        self.cache.free(allocation)

    @rule(tiers=st.sets(st.sampled_from(["l1", "l2"])))
    def flush(self, tiers: set[str]) -> None:
        self.cache.flush(tiers)

    @invariant()
    def no_block_has_two_owners(self) -> None:
        if not hasattr(self, "running"):
            return
        resident = {node.slot for node in self.cache._pool.nodes()}
        private = [
            block
            for allocation, _, _ in self.running
            for block in allocation.block_ids
            if block not in {node.slot for node in allocation.holds[0].nodes if node is not None}
        ]
        assert len(private) == len(set(private))
        assert not resident & set(private)
        stats = self.cache.stats()
        assert stats.l1_free_blocks + len(resident) + len(private) == stats.l1_blocks
        assert stats.l2_free_slots + stats.l2_cached_blocks == stats.l2_slots

    @invariant()
    def l1_holds_whole_prefixes(self) -> None:
        if not hasattr(self, "running"):
            return
        pool = self.cache._pool
        for node in pool.nodes():
            assert node.parent is None or pool.get(0, node.parent) is not None

    def teardown(self) -> None:
        if not hasattr(self, "running"):
            return
        for allocation, _, _ in self.running:
            self.cache.free(allocation)
        assert self.cache.available_blocks == self.cache.usable_blocks
        assert all(node.refs == 0 for node in self.cache._pool.nodes())
        if self.cache._host:
            assert all(node.refs == 0 for node in self.cache._host.index.nodes())
        self.cache.close()


CacheMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
TestCacheMachine = CacheMachine.TestCase
