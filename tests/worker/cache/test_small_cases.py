"""Every sequence of a few calls on a tiny cache, against a reference that is too simple to be wrong.

With one group the reference says exactly what is resident after every call; with several it says what must be admitted
and how much of it must be a hit, from what is resident and held, by trying all possibilities.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import pytest
from moonpool_api.geometry import GroupGeometry
from moonpool_worker.cache.kv_cache import KVCache

from tests.worker.cache.imagined_model import P, Text, audit, begin, cache_of, full, private_blocks, state, window

pytestmark = pytest.mark.property

#: Two texts of three pages that share the first, one that is the first page and a bit, and one alone.
TEXTS = {
    "a": [*range(4), *range(10, 18), 7],
    "b": [*range(4), *range(20, 28)],
    "c": [*range(4), 9],
    "d": [*range(30, 37)],
}
CALLS = [*TEXTS, "end oldest", "end youngest", "flush"]
DEPTH = 5

Prefix = tuple[int, ...]


def pages_of(tokens: list[int]) -> list[Prefix]:
    """The text up to the end of each full page: what names a page."""
    return [tuple(tokens[: end * P]) for end in range(1, len(tokens) // P + 1)]


@dataclass
class Reference:
    """One group that keeps all of the text: LRU, leaves first, and hits count as a use."""

    blocks: int
    resident: dict[Prefix, int] = field(default_factory=dict)
    running: list[tuple[list[int], int]] = field(default_factory=list)
    now: int = 0

    def pinned(self) -> set[Prefix]:
        return {page for tokens, _ in self.running for page in pages_of(tokens)}

    def begin(self, tokens: list[int]) -> int | None:
        """Hits in pages, None when refused; all is computed and published at once."""
        pages = pages_of(tokens)
        hit = 0
        while hit < (len(tokens) - 1) // P and pages[hit] in self.resident:
            hit += 1
        wanted = -(-len(tokens) // P) - hit
        held = self.pinned() | set(pages[:hit])
        private = sum(own for _, own in self.running)
        if wanted > self.blocks - private - len(held):
            return None
        while wanted > self.blocks - private - len(self.resident):
            leaves = [
                page
                for page in self.resident
                if page not in held and not any(other[: len(page)] == page != other for other in self.resident)
            ]
            del self.resident[min(leaves, key=lambda page: (self.resident[page], -len(page)))]
        fresh = [page for page in pages if page not in self.resident]
        for page in pages:
            self.resident[page] = self.now
        self.running.append((tokens, wanted - len(fresh)))
        return hit

    def end(self, which: int) -> None:
        tokens, _ = self.running.pop(which)
        self.now += 1
        for page in pages_of(tokens):
            if page in self.resident:
                self.resident[page] = self.now

    def flush(self) -> None:
        pinned = self.pinned()
        self.resident = {page: at for page, at in self.resident.items() if page in pinned}


def names(cache: KVCache) -> dict[bytes, Prefix]:
    return {
        link: page
        for tokens in TEXTS.values()
        for link, page in zip(cache.chain(tokens), pages_of(tokens), strict=True)
    }


def compute(text: Text) -> None:
    assert text.chunk(len(text.tokens))


@pytest.mark.parametrize("blocks", [4, 5, 7])
def test_one_group_is_an_lru_of_leaves(blocks: int) -> None:
    for calls in itertools.product(CALLS, repeat=DEPTH):
        if calls[0] not in TEXTS:
            continue
        cache, reference = cache_of(full(), parents=blocks), Reference(blocks)
        # Rewards for reuse are another test's: here recency alone decides.
        cache._pool.clock.reward = 0
        link_names, running = names(cache), []
        for call in calls:
            if call in TEXTS:
                hit, text = reference.begin(TEXTS[call]), begin(cache, TEXTS[call])
                assert (text is None) == (hit is None), (calls, call)
                if text is not None:
                    assert text.allocation.cached_tokens // P == hit, (calls, call)
                    compute(text)
                    running.append(text)
            elif call == "flush":
                reference.flush()
                cache.flush({"l1"})
            elif running:
                which = 0 if call == "end oldest" else -1
                reference.end(which)
                text = running.pop(which)
                text.check()
                cache.free(text.allocation)
            assert {link_names[node.digest] for node in cache._pool.nodes()} == set(reference.resident), (calls, call)


@pytest.mark.parametrize(
    ("groups", "parents"),
    [
        ((full(), state(size=8)), 6),
        ((full(), window(6)), 7),
        ((window(5), state(size=24)), 4),
        ((full(layers=2), window(3, block=2), state(size=8)), 5),
    ],
    ids=["full+state", "full+window", "window+state", "three"],
)
def test_several_groups_admit_what_can_be_admitted(groups: tuple[GroupGeometry, ...], parents: int) -> None:
    for calls in itertools.product(CALLS, repeat=DEPTH - 1):
        if calls[0] not in TEXTS:
            continue
        cache = cache_of(*groups, parents=parents)
        running: list[Text] = []
        for call in calls:
            if call in TEXTS:
                possible, hit = expectation(cache, TEXTS[call], running)
                text = begin(cache, TEXTS[call])
                assert (text is not None) == possible, (calls, call)
                if text is not None:
                    assert text.allocation.cached_tokens // P == hit, (calls, call)
                    if text.chunk(len(text.tokens)):
                        running.append(text)
                    else:
                        cache.free(text.allocation)
            elif call == "flush":
                cache.flush({"l1"})
            elif running:
                text = running.pop(0 if call == "end oldest" else -1)
                text.check()
                cache.free(text.allocation)
            audit(cache._pool, private_blocks(cache, [text.allocation for text in running]))


def expectation(cache: KVCache, tokens: list[int], running: list[Text]) -> tuple[bool, int]:
    """Whether the text can be admitted, and the pages that are hit, counted block by block."""
    chain = cache.chain(tokens)
    resident = {(node.group, node.digest): node for node in cache._pool.nodes()}
    groups = cache._device.groups

    def needs(group: int, boundary: int) -> list[int]:
        geometry = groups[group].geometry
        if geometry.family == "state":
            return [boundary - 1] if boundary else []
        first = 0 if geometry.window is None else max(0, boundary * P - max(1, geometry.window - 1))
        return sorted({token // P for token in range(first, boundary * P)})

    hit = max(
        n
        for n in range((len(tokens) - 1) // P + 1)
        if all((g.index, chain[at]) in resident for g in groups for at in needs(g.index, n))
    )
    # What stays: blocks of running texts, pages they hold, and the hit itself.
    tiling = cache._pool._tiling
    stays: dict[int, set[tuple[int, int]]] = {}

    def stay(group: int, block: int) -> None:
        stays.setdefault(tiling.parent_of(group, block), set()).add((group, block))

    for group, blocks in enumerate(private_blocks(cache, [text.allocation for text in running])):
        for block in blocks:
            stay(group, block)
    held = [node for node in resident.values() if node.refs]
    held += [resident[g.index, chain[at]] for g in groups for at in needs(g.index, hit)]
    for node in held:
        for block in node.blocks:
            stay(node.group, block)
    empty = cache._pool.usable_parents - len(stays)
    for group in groups:
        size = group.geometry.block_tokens
        wanted = 1 if group.geometry.family == "state" else -(-len(tokens) // size) - hit * P // size
        packing = tiling.packing[group.index]
        own = [blocks for blocks in stays.values() if next(iter(blocks))[0] == group.index]
        wanted -= sum(packing - len(blocks) for blocks in own)
        empty -= -(-max(0, wanted) // packing)
    return empty >= 0, hit
