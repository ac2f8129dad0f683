"""A model that is imagined: what it would store is a function of the text, and what it reads is checked.

It reads, as a real one would, all that a chunk's tokens look at: every row of a group that keeps all of the text, the
rows inside a window, the state before the chunk. A wrong, missing or half-written block anywhere is a failure.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from moonpool_api.geometry import CacheGeometry, GroupGeometry, PlaneGeometry
from moonpool_worker.cache.allocation import Allocation
from moonpool_worker.cache.block_pool import BlockPool
from moonpool_worker.cache.device_arena import NULL_BLOCK, DeviceArena
from moonpool_worker.cache.kv_cache import KVCache
from moonpool_worker.engine.chunks import states_of

P = 4


def full(name: str = "full", block: int = P, layers: int = 1, row: int = 8) -> GroupGeometry:
    return _history(name, None, block, layers, row)


def window(tokens: int, name: str = "window", block: int = P, layers: int = 1, row: int = 8) -> GroupGeometry:
    return _history(name, tokens, block, layers, row)


def state(name: str = "state", layers: int = 1, size: int = 64) -> GroupGeometry:
    plane = PlaneGeometry(name="s", shape=(size,), dtype="float32")
    return GroupGeometry(name=name, family="state", block_tokens=P, layers=tuple(range(layers)), planes=(plane,))


def _history(name: str, window: int | None, block: int, layers: int, row: int) -> GroupGeometry:
    plane = PlaneGeometry(name="k", shape=(row,), dtype="float32")
    return GroupGeometry(name=name, window=window, block_tokens=block, layers=tuple(range(layers)), planes=(plane,))


def cache_of(*groups: GroupGeometry, parents: int, **options: object) -> KVCache:
    geometry = CacheGeometry(prefix_granularity=P, groups=groups)
    return KVCache(DeviceArena(geometry, parents + 1), "a" * 64, **options)  # type: ignore[arg-type]


@functools.lru_cache(maxsize=4096)
def contents(group: int, tokens: tuple[int, ...], shape: tuple[int, int]) -> torch.Tensor:
    """The bytes ``[fields, field_bytes]`` of a block whose last row, or whose state, is that of the last token."""
    digest = hashlib.blake2b(repr((group, tokens)).encode()).digest()
    size = shape[0] * shape[1]
    return torch.frombuffer(bytearray((digest * (size // len(digest) + 1))[:size]), dtype=torch.uint8).view(shape)


@dataclass
class Text:
    """A text under way; ``computed`` of its tokens have been computed."""

    cache: KVCache
    tokens: list[int]
    allocation: Allocation
    chain: list[bytes] = field(default_factory=list)

    @property
    def computed(self) -> int:
        return self.allocation.computed

    def chunk(self, end: int) -> bool:
        """Compute the tokens up to ``end`` and publish them; False when there was no room."""
        if not self.cache.extend(self.allocation, end):
            return False
        self.check()
        self._write(end)
        self.chain = self.cache.chain(self.tokens, known=self.chain)
        self.cache.publish(self.allocation, self.chain, end)
        return True

    def check(self) -> None:
        """All that the next token looks at is what was computed for this very text."""
        start = self.computed
        for group, hold in zip(self.cache._device.groups, self.allocation.holds, strict=True):
            if group.geometry.family == "state":
                self._check_block(group.index, hold.source, start)
                continue
            size = group.geometry.block_tokens
            for at in range(group.passed(start), -(-start // size)):
                self._check_block(group.index, hold.table[at], min(start, (at + 1) * size))

    def _check_block(self, group: int, block: int, upto: int) -> None:
        found = self.cache.arena.fields(group)[:, block]
        if upto == 0:
            assert block == NULL_BLOCK
            return
        assert block != NULL_BLOCK, f"group {group} has a hole where token {upto - 1} is looked at"
        wanted = contents(group, tuple(self.tokens[:upto]), tuple(found.shape))
        assert torch.equal(found, wanted), f"block {block} of group {group} is not that of {self.tokens[:upto]}"

    def _write(self, end: int) -> None:
        start = self.computed
        for group, hold in zip(self.cache._device.groups, self.allocation.holds, strict=True):
            if group.geometry.family == "state":
                slots = states_of(self.allocation, end)[group.index]
                assert slots is not None
                for position, block in slots.targets:
                    self._fill(group.index, block, position)
                continue
            size = group.geometry.block_tokens
            for at in range(start // size, -(-end // size)):
                self._fill(group.index, hold.table[at], min(end, (at + 1) * size))

    def _fill(self, group: int, block: int, upto: int) -> None:
        assert block != NULL_BLOCK
        part = self.cache.arena.fields(group)[:, block]
        part.copy_(contents(group, tuple(self.tokens[:upto]), tuple(part.shape)))


def begin(cache: KVCache, tokens: Sequence[int], chunk: int | None = None) -> Text | None:
    """Admit a text; None when there is no room."""
    chain = cache.chain(tokens)
    allocation = cache.admit(chain, len(tokens), chunk=chunk)
    if allocation is None:
        return None
    text = Text(cache, list(tokens), allocation, chain)
    text.check()
    return text


def run(cache: KVCache, tokens: Sequence[int], chunk: int = 1 << 30) -> int:
    """Compute a whole text, ``chunk`` tokens at a time, and free it; returns how many tokens were cached."""
    text = begin(cache, tokens, chunk)
    assert text is not None
    while text.computed < len(tokens):
        assert text.chunk(min(len(tokens), text.computed + chunk))
    cache.free(text.allocation)
    return text.allocation.cached_tokens


def audit(pool: BlockPool, private: Sequence[Sequence[int]]) -> None:
    """Every block is free, private (``private[g]``) or a node's, and the pool's counts say so."""
    tiling = pool._tiling
    pinned: dict[int, int] = {}
    owner: dict[int, int] = {}
    used: set[tuple[int, int]] = set()

    def use(group: int, block: int, pins: int) -> None:
        parent = tiling.parent_of(group, block)
        assert (group, block) not in used, f"block {block} of group {group} has two owners"
        used.add((group, block))
        assert owner.setdefault(parent, group) == group, f"parent {parent} has two groups"
        pinned[parent] = pinned.get(parent, 0) + pins

    for node in pool.nodes():
        for block in node.blocks:
            use(node.group, block, int(node.refs > 0))
    for group, blocks in enumerate(private):
        for block in blocks:
            use(group, block, 1)
    assert pool.free_parents == pool.usable_parents - len(owner)
    assert pool._claimable == pool.usable_parents - sum(count > 0 for count in pinned.values())
    for group, packing in enumerate(tiling.packing):
        mine = [parent for parent, who in owner.items() if who == group]
        assert len(pool._free[group]) == sum(
            packing - sum((group, block) in used for block in tiling.blocks_of(group, parent)) for parent in mine
        )
        assert pool._in_place[group] == sum(packing - pinned[parent] for parent in mine if pinned[parent])


def private_blocks(cache: KVCache, allocations: Sequence[Allocation]) -> list[list[int]]:
    """Blocks of running texts that are no node's, by group."""
    private: list[list[int]] = [[] for _ in cache._device.groups]
    for allocation in allocations:
        for group, hold in zip(cache._device.groups, allocation.holds, strict=True):
            shared = {block for node in (*hold.nodes, hold.origin) if node is not None for block in node.blocks}
            blocks = [*hold.table, hold.live, *hold.checkpoints.values()]
            private[group.index] += [block for block in blocks if block and block not in shared]
    return private


def picture(cache: KVCache) -> list[object]:
    """All that a refused admission must leave as it was."""
    seen: list[object] = []
    for pool in (cache._pool, cache._host.index if cache._host else None):
        if pool is not None:
            seen.append(sorted((n.group, n.digest, n.blocks, n.refs, n.tick, n.hits) for n in pool.nodes()))
            seen += [pool.free_parents, pool._claimable, list(pool._in_place), pool.evictions, list(pool._pinned)]
    return seen
