"""A cache with groups of any kind under any sequence of calls, checked after each of them."""

from __future__ import annotations

import random

from moonpool_api.geometry import GroupGeometry
from moonpool_worker.cache.suspension import Suspended

from tests.worker.cache.imagined_model import (
    P,
    Text,
    audit,
    begin,
    cache_of,
    full,
    picture,
    private_blocks,
    state,
    window,
)

GROUPS: tuple[tuple[GroupGeometry, ...], ...] = (
    (full(),),
    (full(block=2),),
    (full(layers=2), window(9)),
    (full(block=1), window(3, block=2)),
    (window(6), full(row=24)),
    (full(), state(size=40)),
    (full(), state(layers=3)),
    (state(),),
    (window(5),),
    (full(layers=2), window(6, layers=3), state(layers=2)),
    (full(row=4), window(2, block=1, row=12), state(size=100)),
    (full(), full("other", block=2, row=20), window(7, block=2)),
)

#: Operations by how often they should come.
OPERATIONS = (
    ["admit"] * 6
    + ["compute"] * 10
    + ["free"] * 3
    + ["suspend"] * 2
    + ["resume"] * 3
    + ["keep_state", "flush", "damage"]
)


class GroupsMachine:
    """Texts are paths in a tree of few branches, so that they share prefixes often. Every operation takes a source of
    chance for its arguments, and does nothing when there is nothing to do it to."""

    def __init__(self, groups: tuple[GroupGeometry, ...], parents: int, l2_parents: int, alignment: int = 64) -> None:
        self.cache = cache_of(*groups, parents=parents)
        if l2_parents:
            size = 1 << 20
            probe = cache_of(*groups, parents=1, l2_bytes=size, l2_alignment=alignment)
            assert probe._host is not None
            unit = probe._host.layout.parent_bytes
            probe.close()
            self.cache = cache_of(*groups, parents=parents, l2_bytes=l2_parents * unit, l2_alignment=alignment)
        self.running: list[Text] = []
        self.suspended: list[tuple[Suspended, Text]] = []
        self.resumed = 0

    def do(self, operation: str, chance: random.Random) -> None:
        getattr(self, operation)(chance)
        self.check()

    # -- operations --------------------------------------------------------------------------------------------

    def text(self, chance: random.Random) -> list[int]:
        tokens: list[int] = []
        for _ in range(chance.randrange(7)):
            branch = chance.choice((0, 0, 0, 1))
            tokens += random.Random(f"{tokens}{branch}").choices(range(50_000), k=P)
        return tokens + [7] * chance.randrange(1, P + 1)

    def admit(self, chance: random.Random) -> None:
        tokens = self.text(chance)
        seen = self.cache.probe(self.cache.chain(tokens)[: (len(tokens) - 1) // P])
        before = picture(self.cache)
        mismatches = self._mismatches()
        text = begin(self.cache, tokens, chance.choice((1, 4, 6, 100)))
        if text is None:
            # A page found damaged on the way is gone, and what was taken to copy it to may have cost others.
            assert picture(self.cache) == before or self._mismatches() > mismatches
            return
        if self._mismatches() == mismatches:
            assert text.allocation.cached_tokens == seen.tokens
        assert text.allocation.cached_tokens == text.allocation.cached.total
        self.running.append(text)

    def compute(self, chance: random.Random) -> None:
        if not self.running:
            return
        text = chance.choice(self.running)
        end = min(len(text.tokens), text.computed + chance.randrange(1, 15))
        if end == text.computed:
            text.tokens.append(11)
            end += 1
        text.chunk(end)

    def keep_state(self, chance: random.Random) -> None:
        if self.running:
            text = chance.choice(self.running)
            at = P * chance.randrange(1, 6)
            if at <= len(text.tokens):
                self.cache.keep_state(text.allocation, at)

    def free(self, chance: random.Random) -> None:
        if self.running:
            text = self.running.pop(chance.randrange(len(self.running)))
            text.check()
            self.cache.free(text.allocation)

    def suspend(self, chance: random.Random) -> None:
        if not self.running:
            return
        text = chance.choice(self.running)
        suspended = self.cache.suspend(text.allocation)
        if suspended is None:
            text.check()
            return
        self.running.remove(text)
        self.suspended.append((suspended, text))

    def resume(self, chance: random.Random) -> None:
        if not self.suspended:
            return
        suspended, text = pair = chance.choice(self.suspended)
        if chance.random() < 0.2:
            self.cache.drop_suspended(suspended)
            self.suspended.remove(pair)
            return
        before = picture(self.cache)
        allocation = self.cache.resume(suspended, len(text.tokens), chance.choice((1, 100)))
        assert not suspended.lost
        if allocation is None:
            assert picture(self.cache) == before
            return
        assert allocation.computed == suspended.computed
        text.allocation = allocation
        text.check()
        self.suspended.remove(pair)
        self.running.append(text)
        self.resumed += 1

    def flush(self, chance: random.Random) -> None:
        self.cache.flush({tier for tier in ("l1", "l2") if chance.random() < 0.5})

    def damage(self, chance: random.Random) -> None:
        """A page of L2 holds other bytes than it should, as after a crash: it is a miss, nothing worse."""
        host = self.cache._host
        nodes = sorted(host.index.nodes(), key=lambda node: node.serial) if host else []
        if host is None or self.suspended or not nodes:
            return
        node = chance.choice(nodes)
        host.slot(node.group, node.slot)[-1] ^= 1
        node.checked = False

    # -- checks ------------------------------------------------------------------------------------------------

    def check(self) -> None:
        pool = self.cache._pool
        audit(pool, private_blocks(self.cache, [text.allocation for text in self.running]))
        for node in pool.nodes():
            if self.cache._device.groups[node.group].closed and node.parent is not None:
                assert pool.get(node.group, node.parent) is not None, "L1 has a page without the one before it"
        if self.cache._host is None:
            return
        saved: list[list[int]] = [[] for _ in self.cache._device.groups]
        for suspended, _ in self.suspended:
            for group, part in enumerate(suspended.parts):
                saved[group] += part.slots
        # Pages that were flushed while suspended texts need them are in no index, but still theirs.
        gone = {
            (node.group, node.slot)
            for suspended, _ in self.suspended
            for part in suspended.parts
            for node in part.pages.values()
            if not node.resident
        }
        for group, slot in gone:
            saved[group].append(slot)
        audit(self.cache._host.index, saved)

    def finish(self) -> None:
        """Nothing is held by anybody: everything is free or can be evicted."""
        for text in self.running:
            self.cache.free(text.allocation)
        for suspended, _ in self.suspended:
            self.cache.drop_suspended(suspended)
        pools = [self.cache._pool] + ([self.cache._host.index] if self.cache._host else [])
        for pool in pools:
            assert all(node.refs == 0 for node in pool.nodes())
            assert pool._claimable == pool.usable_parents
        for group in self.cache._device.groups:
            for layer in group.geometry.layers:
                for plane in group.geometry.planes:
                    assert not self.cache.arena.view(group.index, layer, plane.name)[0].any(), "the null block"
        self.cache.close()

    def _mismatches(self) -> int:
        return sum(self.cache._stats.header_mismatches.values())
