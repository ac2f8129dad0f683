"""The arithmetic of a rolling update, as a table, and its promises for arbitrary numbers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from moonpool_operator.plan.rollout import Limits, RevisionCount, complete, next_counts


def revision(name: str, replicas: int, available: int | None = None, ready: int | None = None) -> RevisionCount:
    available = replicas if available is None else available
    return RevisionCount(name, replicas, available if ready is None else ready, available, replicas)


TABLE = [
    # what happens, new, old, terminating, (desired, surge, unavailable), expected
    ("first deployment", revision("b", 0), [], 0, (3, 1, 0), {"b": 3}),
    ("scale up in peace", revision("b", 2), [], 0, (5, 1, 0), {"b": 5}),
    ("scale down in peace", revision("b", 5), [], 0, (2, 1, 0), {"b": 2}),
    ("scale to zero", revision("b", 2), [], 0, (0, 1, 0), {"b": 0}),
    ("surge first", revision("b", 0), [revision("a", 2)], 0, (2, 1, 0), {"b": 1, "a": 2}),
    ("surge not yet available", revision("b", 1, 0), [revision("a", 2)], 0, (2, 1, 0), {"b": 1, "a": 2}),
    ("ready but not routed to", revision("b", 1, 0, 1), [revision("a", 2)], 0, (2, 1, 0), {"b": 1, "a": 2}),
    ("one may go", revision("b", 1, 1), [revision("a", 2)], 0, (2, 1, 0), {"b": 1, "a": 1}),
    ("no room while one drains", revision("b", 1, 1), [revision("a", 1)], 1, (2, 1, 0), {"b": 1, "a": 1}),
    ("room again", revision("b", 1, 1), [revision("a", 1)], 0, (2, 1, 0), {"b": 2, "a": 1}),
    ("the last old one", revision("b", 2, 2), [revision("a", 1)], 0, (2, 1, 0), {"b": 2, "a": 0}),
    ("no surge: make room first", revision("b", 0), [revision("a", 3)], 0, (3, 0, 1), {"b": 0, "a": 2}),
    ("no surge: wait for the drain", revision("b", 0), [revision("a", 2)], 1, (3, 0, 1), {"b": 0, "a": 2}),
    ("no surge: then grow", revision("b", 0), [revision("a", 2)], 0, (3, 0, 1), {"b": 1, "a": 2}),
    ("a broken old one goes at once", revision("b", 0), [revision("a", 2, 1)], 0, (2, 1, 0), {"b": 1, "a": 1}),
    (
        "A to B to C: the half-born B goes, A serves",
        revision("c", 0),
        [revision("a", 2), revision("b", 1, 0)],
        0,
        (2, 1, 0),
        {"c": 0, "a": 2, "b": 0},
    ),
    (
        "back to A: B is not needed",
        revision("a", 2),
        [revision("b", 1, 1)],
        0,
        (2, 1, 0),
        {"a": 2, "b": 0},
    ),
    ("gateways silent: nothing goes", revision("b", 1, 0, 1), [revision("a", 2, 0, 2)], 0, (2, 1, 0), {"b": 1, "a": 2}),
    ("replicas lowered in mid-roll", revision("b", 1, 1), [revision("a", 4)], 0, (2, 1, 0), {"b": 1, "a": 1}),
    ("replicas raised in mid-roll", revision("b", 1, 1), [revision("a", 2)], 0, (5, 1, 0), {"b": 4, "a": 2}),
    (
        "the ReplicaSet controller is behind: its surplus pod still holds room",
        revision("b", 1, 1),
        [RevisionCount("a", 1, 2, 2, 2)],
        0,
        (2, 1, 0),
        {"b": 1, "a": 1},
    ),
    (
        "and what it is about to remove is counted on no more",
        revision("b", 2, 2),
        [RevisionCount("a", 1, 2, 1, 2)],
        0,
        (3, 0, 1),
        {"b": 2, "a": 1},
    ),
    ("everything at once", revision("b", 0), [revision("a", 2)], 0, (2, 2, 2), {"b": 2, "a": 0}),
]


@pytest.mark.parametrize(
    ("new", "old", "terminating", "limits", "expected"), [r[1:] for r in TABLE], ids=[r[0] for r in TABLE]
)
def test_next_counts(new, old, terminating, limits, expected) -> None:
    assert next_counts(new, old, terminating, Limits(*limits)) == expected


@st.composite
def _revision(draw, name: str) -> RevisionCount:
    replicas = draw(st.integers(0, 8))
    ready = draw(st.integers(0, replicas))
    return RevisionCount(name, replicas, ready, draw(st.integers(0, ready)))


@given(
    _revision("new"),
    st.lists(st.sampled_from("abc"), unique=True, max_size=3).flatmap(
        lambda names: st.tuples(*(_revision(name) for name in names))
    ),
    st.integers(0, 4),
    st.integers(0, 8),
    st.integers(0, 3),
    st.integers(0, 3),
)
def test_promises(new, old, terminating, desired, surge, unavailable) -> None:
    if surge == 0 and unavailable == 0:
        surge = 1
    limits = Limits(desired, surge, unavailable)
    counts = next_counts(new, list(old), terminating, limits)
    before = new.replicas + sum(each.replicas for each in old)
    after = sum(counts.values())
    assert after + terminating <= max(limits.ceiling, before + terminating) or (not old and terminating == 0)
    assert all(counts[each.name] <= each.replicas for each in old), "old revisions only shrink"
    assert counts["new"] <= desired
    # The worst case: a ReplicaSet removes unready pods first, then available ones before unlisted ones.
    lost = sum(
        max(0, min(each.available, (each.replicas - counts[each.name]) - (each.replicas - each.ready))) for each in old
    )
    available = new.available + sum(each.available for each in old)
    assert available - lost >= min(available, limits.floor)


def test_complete_needs_every_old_pod_gone() -> None:
    assert complete(revision("b", 2), 0, 2)
    assert not complete(revision("b", 2), 1, 2)
    assert not complete(revision("b", 2, 1), 0, 2)
    assert complete(revision("b", 0), 0, 0)
