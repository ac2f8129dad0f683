"""After any sequence of calls, with groups of any kind: what is read is what was computed, and nothing is leaked."""

from __future__ import annotations

import random

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from moonpool_api.geometry import GroupGeometry

from tests.worker.cache.groups_machine import GROUPS, OPERATIONS, GroupsMachine

pytestmark = pytest.mark.property


@settings(max_examples=300, deadline=None)
@given(
    groups=st.sampled_from(GROUPS),
    parents=st.integers(3, 20),
    l2_parents=st.integers(0, 20),
    program=st.lists(st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 1 << 20)), min_size=10, max_size=60),
)
def test_any_sequence(
    groups: tuple[GroupGeometry, ...], parents: int, l2_parents: int, program: list[tuple[str, int]]
) -> None:
    machine = GroupsMachine(groups, parents, l2_parents)
    for operation, seed in program:
        machine.do(operation, random.Random(seed))
    stats = machine.cache.stats()
    event(f"hits in l1 {stats.hit_tokens.l1 > 0}, in l2 {stats.hit_tokens.l2 > 0}")
    event(f"resumed {machine.resumed > 0}, refused {stats.refused > 0}, mismatches {bool(stats.header_mismatches)}")
    event(f"evictions {stats.l1_evictions['capacity'] > 0}, in l2 {stats.l2_evictions['capacity'] > 0}")
    machine.finish()


@pytest.mark.parametrize("groups", GROUPS, ids=lambda groups: "+".join(group.name for group in groups))
def test_long_sequences(groups: tuple[GroupGeometry, ...]) -> None:
    """Long enough for fragments and old pages to pile up."""
    for seed in range(4):
        chance = random.Random(seed)
        machine = GroupsMachine(groups, chance.randrange(4, 24), chance.choice((0, 6, 24)))
        for _ in range(300):
            machine.do(chance.choice(OPERATIONS), chance)
        machine.finish()
