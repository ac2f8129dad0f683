"""The boundary that all groups agree on, against trying all of them."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from moonpool_api.geometry import CacheGeometry, GroupGeometry
from moonpool_worker.cache.cache_group import cache_groups
from moonpool_worker.cache.prefix_match import Composition, Match

from tests.worker.cache.imagined_model import P, full, state, window

Present = set[tuple[int, int]]


def composition(*groups: GroupGeometry) -> Composition:
    return Composition(cache_groups(CacheGeometry(prefix_granularity=P, groups=groups)))


def brute_force(groups: tuple[GroupGeometry, ...], pages: int, present: Present) -> int:
    """The longest boundary at which every group, looked at token by token, has what the next token needs."""

    def usable(index: int, group: GroupGeometry, boundary: int) -> bool:
        if group.family == "state":
            return boundary == 0 or (index, boundary - 1) in present
        first = 0 if group.window is None else max(0, boundary * P - max(1, group.window - 1))
        return all((index, token // P) in present for token in range(first, boundary * P))

    return max(n for n in range(pages + 1) if all(usable(i, group, n) for i, group in enumerate(groups)))


KINDS = [
    full("a"),
    full("b", block=2),
    window(2, "c"),
    window(5, "d"),
    window(6, "e", block=2),
    window(13, "f"),
    state("g"),
]


@pytest.mark.property
@settings(max_examples=400, deadline=None)
@given(
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=4, unique_by=lambda group: group.name),
    pages=st.integers(0, 9),
    seed=st.integers(0, 1 << 16),
    density=st.sampled_from([0.5, 0.8, 0.95]),
)
def test_the_joint_boundary_is_the_longest_in_any_order(
    kinds: list[GroupGeometry], pages: int, seed: int, density: float
) -> None:
    chance = random.Random(seed)
    by_name = {group.name: {at for at in range(pages) if chance.random() < density} for group in kinds}
    for order in itertools.permutations(kinds):
        present = {(index, at) for index, group in enumerate(order) for at in by_name[group.name]}
        match = composition(*order).joint(pages, lambda *one, present=present: one in present)
        assert match.boundary == brute_force(order, pages, present)


@pytest.mark.property
@settings(max_examples=300, deadline=None)
@given(
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=3, unique_by=lambda group: group.name),
    pages=st.integers(0, 8),
    seed=st.integers(0, 1 << 16),
)
def test_a_fetch_plan_brings_what_is_needed_and_no_more(kinds: list[GroupGeometry], pages: int, seed: int) -> None:
    chance, groups = random.Random(seed), tuple(kinds)
    every = [(group, at) for group in range(len(groups)) for at in range(pages)]
    here = {one for one in every if chance.random() < 0.4}
    stored = {one for one in every if chance.random() < 0.7}
    both = composition(*groups)
    asked = both.unknown(pages, lambda *one: one in here)
    assert not set(asked) & here
    # The store knows only of what it was asked for: that must be enough.
    plan = both.plan_fetch(pages, lambda *one: one in here, lambda *one: one in stored and one in set(asked))
    assert plan.boundary == brute_force(groups, pages, here | stored)
    assert set(plan.wanted) <= stored - here
    assert brute_force(groups, pages, here | set(plan.wanted)) >= plan.boundary
    for one in plan.wanted:
        assert brute_force(groups, plan.boundary, (here | set(plan.wanted)) - {one}) < plan.boundary


def test_a_deep_cascade_needs_more_than_one_sweep() -> None:
    """Each group lowers the bound for the other in turn."""
    states = {(0, 6), (0, 4), (0, 2), (0, 0)}
    runs = {(1, at) for at in (0, 2, 3, 5)}
    both = composition(state(), window(9))
    match = both.joint(7, lambda *one: one in states | runs)
    assert match.boundary == brute_force((state(), window(9)), 7, states | runs) == 1


def test_what_the_closed_groups_agree_on_is_told_apart_from_the_hit() -> None:
    present = {(0, at) for at in range(5)} | {(1, 1)}
    assert composition(full(), state()).joint(6, lambda *one: one in present) == Match(boundary=2, agreed=5)


def test_what_a_hit_reads() -> None:
    both = composition(full(), window(6, block=2), state())
    assert [both.needs(group, 4) for group in range(3)] == [range(4), range(2, 4), range(3, 4)]
    assert [both.needs(group, 0) for group in range(3)] == [range(0), range(0), range(0)]
