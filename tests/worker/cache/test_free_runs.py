from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from moonpool_worker.cache.free_runs import FreeRuns


def test_a_fresh_pool_gives_neighbours() -> None:
    assert FreeRuns(1, 10).take(4) == [1, 2, 3, 4]


def test_growth_follows_the_last_block() -> None:
    free = FreeRuns(1, 100)
    first, second = free.take(4), free.take(4)
    for owner in (first, second):
        for _ in range(8):
            owner += free.take(1, after=owner[-1])
    assert first == list(range(first[0], first[0] + 12))
    assert second == list(range(second[0], second[0] + 12))


def test_a_returned_run_is_whole_again() -> None:
    free = FreeRuns(0, 8)
    ids = free.take(8)
    free.give(ids[::2])
    free.give(ids[1::2])
    assert free.take(8) == list(range(8))


def test_too_many_takes_nothing() -> None:
    free = FreeRuns(0, 3)
    with pytest.raises(ValueError, match="3 are free"):
        free.take(4)
    assert len(free) == 3


def test_an_alien_id_is_refused() -> None:
    with pytest.raises(ValueError, match="not among"):
        FreeRuns(1, 3).give([0])


@given(st.lists(st.tuples(st.integers(0, 9), st.booleans(), st.integers(0, 40)), max_size=60))
def test_ids_are_never_lost_nor_handed_out_twice(steps: list[tuple[int, bool, int]]) -> None:
    free = FreeRuns(1, 40)
    held: list[int] = []
    for count, give, pick in steps:
        if give:
            back, held = held[:pick], held[pick:]
            free.give(back)
        elif count <= len(free):
            held += free.take(count, after=held[-1] if held else None)
        assert len(set(held)) == len(held)
        assert all(1 <= one <= 40 for one in held)
        assert len(free) + len(held) == 40
    free.give(held)
    assert free.take(40) == list(range(1, 41))
