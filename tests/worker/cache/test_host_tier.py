"""L2 with several groups, and what is left of it after a crash."""

from __future__ import annotations

import os

import pytest
from moonpool_api.geometry import GroupGeometry
from moonpool_worker.cache.kv_cache import KVCache
from moonpool_worker.cache.stats import TierTokens

from tests.worker.cache.imagined_model import P, audit, begin, cache_of, full, run, state, window

HYBRID = (full(layers=2), window(6, layers=3), state(layers=2))
TEXT = list(range(100, 100 + 5 * P + 1))


def make(fd: int | None = None, groups: tuple[GroupGeometry, ...] = HYBRID, **options: object) -> KVCache:
    return cache_of(*groups, parents=64, l2_bytes=1 << 20, l2_fd=fd, **options)


@pytest.fixture
def fd() -> int:
    return os.memfd_create("test")


def crash(cache: KVCache) -> None:
    """The process is gone; the memory is not."""
    cache._host._memory.close()  # type: ignore[union-attr]


def test_slots_of_all_groups_tile_the_memory() -> None:
    host = make()._host
    assert host is not None
    taken = {}
    for group in range(host.num_groups):
        for _ in range(5):
            slot = host.take_slot(group)
            assert slot is not None
            start = host.offset(group, slot)
            taken[range(start, start + host.object_bytes(group))] = group
    bytes_used = [byte for part in taken for byte in part]
    assert len(bytes_used) == len(set(bytes_used))
    assert max(bytes_used) < host.nbytes
    parents: dict[int, set[int]] = {}
    for part, group in taken.items():
        parents.setdefault(part.start // host.layout.parent_bytes, set()).add(group)
    assert all(len(groups) == 1 for groups in parents.values())


def test_what_l1_lost_comes_back_from_l2_for_all_groups() -> None:
    cache = make()
    run(cache, TEXT)
    cache.flush({"l1"})
    text = begin(cache, TEXT)
    assert text is not None
    assert text.allocation.cached == TierTokens(l2=5 * P)


def test_a_hit_may_come_from_both_tiers() -> None:
    cache = make()
    run(cache, TEXT)
    # L1 loses what only the boundary needs: the states and the pages of the window.
    for node in list(cache._pool.nodes()):
        if node.group != 0:
            cache._pool.remove(node)
    text = begin(cache, TEXT)
    assert text is not None
    assert text.allocation.cached == TierTokens(l1=5 * P)


def test_l2_survives_the_process(fd: int) -> None:
    first = make(fd)
    run(first, TEXT)
    kept = first.stats().l2_cached_blocks
    crash(first)
    second = make(fd)
    report = second.restore()
    assert sum(report.pages.values()) == kept == second.stats().l2_cached_blocks
    assert not report.refused
    assert second._host is not None
    audit(second._host.index, [[], [], []])
    text = begin(second, TEXT)
    assert text is not None
    assert text.allocation.cached == TierTokens(l2=5 * P)


def test_a_restored_page_is_read_through_its_checksum(fd: int) -> None:
    first = make(fd)
    run(first, TEXT)
    node = first._host.index.get(0, first.chain(TEXT)[3])  # type: ignore[union-attr]
    assert node is not None
    first._host.slot(0, node.slot)[-1] ^= 1  # type: ignore[union-attr]
    crash(first)
    second = make(fd)
    second.restore()
    text = begin(second, TEXT)
    assert text is not None
    # Page 3 is out; before it there is no checkpoint of the states, so nothing can be resumed.
    assert text.allocation.cached_tokens == 0
    assert second.stats().header_mismatches == {"l2.checksum": 1}


def test_another_namespaces_pages_are_not_taken(fd: int) -> None:
    first = make(fd)
    run(first, TEXT)
    crash(first)
    second = make(fd)
    second.namespace = "b" * 64
    report = second.restore()
    assert not report.pages
    assert set(report.refused) == {"key"}
    assert second.stats().l2_free_slots == second.stats().l2_slots


def test_a_slot_that_was_being_overwritten_is_not_taken(fd: int) -> None:
    first = make(fd, (full(),))
    run(first, TEXT)
    first.flush({"l2"})
    host = first._host
    assert host is not None
    # The crash comes while pages are written: their headers are gone, the old payloads partly there.
    for _ in range(3):
        assert host.take_slot(0) is not None
    crash(first)
    second = make(fd, (full(),))
    assert second.restore().pages == {0: 2}


def test_a_parent_that_changed_hands_is_read_as_its_last_owners(fd: int) -> None:
    """Old headers of another group may still lie in a parent: nothing of it is ever served as that group's."""
    groups = (full(row=4), window(6, row=200), state(size=900))
    first = make(fd, groups)
    for seed in range(6):
        tokens = [1000 * seed + token for token in TEXT]
        run(first, tokens)
        first.flush({"l1", "l2"})
    run(first, TEXT)
    crash(first)
    second = make(fd, groups)
    second.restore()
    host = second._host
    assert host is not None
    audit(host.index, [[], [], []])
    # Each page that came back is that of its link: reading it is checked, byte by byte.
    for seed in range(6):
        text = begin(second, [1000 * seed + token for token in TEXT])
        assert text is not None
        second.free(text.allocation)
    assert begin(second, TEXT).allocation.cached_tokens == 5 * P  # type: ignore[union-attr]


def test_a_memory_of_another_size_is_used_as_far_as_it_goes(fd: int) -> None:
    first = make(fd, (full(),))
    run(first, TEXT)
    crash(first)
    small = cache_of(full(), parents=64, l2_bytes=3 * 4096, l2_fd=fd)
    assert small.restore().pages == {0: 3}
    assert os.fstat(fd).st_size == 3 * 4096


def test_nothing_is_restored_into_an_empty_memory() -> None:
    assert make().restore().pages == {}
