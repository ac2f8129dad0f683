from __future__ import annotations

import pytest
from moonpool_worker.cache.prefix_index import Node, PrefixIndex


class Tier:
    """An index that writes down whose slots came free."""

    def __init__(self) -> None:
        self.released: list[bytes] = []
        self.index = PrefixIndex(lambda node: self.released.append(node.digest))

    def add(self, name: str, parent: str | None = None, refs: int = 0) -> Node:
        return self.index.insert(name.encode(), parent.encode() if parent else None, (0,), refs=refs)

    def evict(self) -> str | None:
        victim = self.index.victim()
        if victim is None:
            return None
        self.index.remove(victim)
        return victim.digest.decode()


def test_leaves_go_first_and_the_oldest_among_them() -> None:
    tier = Tier()
    tier.add("root")
    tier.add("old", "root")
    tier.add("new", "root")
    assert [tier.evict() for _ in range(4)] == ["old", "new", "root", None]
    assert tier.released == [b"old", b"new", b"root"]


def test_a_touch_saves_a_leaf() -> None:
    tier = Tier()
    first = tier.add("first")
    tier.add("second")
    tier.index.touch([first])
    assert tier.evict() == "second"


def test_what_is_referred_to_stays_with_its_ancestors() -> None:
    tier = Tier()
    tier.add("root")
    leaf = tier.add("leaf", "root", refs=1)
    assert tier.evict() is None
    tier.index.unref(leaf)
    assert tier.evict() == "leaf"


def test_a_removed_block_keeps_its_slot_until_the_last_reference() -> None:
    tier = Tier()
    node = tier.add("x", refs=2)
    tier.index.remove(node)
    tier.index.unref(node)
    assert tier.index.get(b"x") is None
    assert tier.released == []
    tier.index.unref(node)
    assert tier.released == [b"x"]


def test_a_parent_that_comes_back_is_no_leaf() -> None:
    tier = Tier()
    tier.add("root")
    tier.add("leaf", "root")
    root = tier.index.get(b"root")
    assert root is not None
    tier.index.remove(root)
    tier.add("root")
    assert [tier.evict(), tier.evict()] == ["leaf", "root"]


def test_double_release_and_double_insert_are_bugs() -> None:
    tier = Tier()
    node = tier.add("x")
    with pytest.raises(RuntimeError, match="more often"):
        tier.index.unref(node)
    with pytest.raises(KeyError, match="resident already"):
        tier.add("x")


def test_a_match_ends_at_the_first_gap() -> None:
    tier = Tier()
    tier.add("a")
    tier.add("c", "b")
    assert [node.digest for node in tier.index.match([b"a", b"b", b"c"])] == [b"a"]
    assert tier.index.unreferenced == 2


def test_an_eviction_does_not_scan() -> None:
    """10,000 blocks in chains of ten, all touched often: work per eviction stays logarithmic, not linear."""
    tier = Tier()
    nodes = [tier.add(f"{chain}/{i}", f"{chain}/{i - 1}" if i else None) for chain in range(1000) for i in range(10)]
    for _ in range(20):
        tier.index.touch(nodes)
    # Counted, not timed: every node enters the heap at most once however often it is touched.
    assert len(tier.index._heap) <= len(nodes)
    evicted = [tier.evict() for _ in range(10_000)]
    assert None not in evicted
    assert tier.evict() is None


def test_pages_that_leave_by_a_flush_are_forgotten_by_the_heap_too() -> None:
    tier = Tier()
    for _ in range(500):
        tier.add("a")
        tier.add("b", "a")
        tier.index.clear()
    assert len(tier.index) == 0
    assert len(tier.index._heap) < 100
