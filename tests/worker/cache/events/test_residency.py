"""Residency: what subscribers are told is what the tiers hold."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from moonpool_worker.cache.events.residency import Residency
from moonpool_worker.cache.events.wire import Cleared, Event, Removed, Stored

PAGE, GROUPS = 2, 2
LINKS = [bytes([number]) * 32 for number in range(4)]


class Told:
    """A subscriber: replays batches into sets of links by tier."""

    def __init__(self) -> None:
        self.batches: list[list[Event]] = []
        self.held: dict[str, set[bytes]] = {"l1": set(), "l2": set()}

    def publish(self, events: list[Event]) -> None:
        self.batches.append(events)
        for event in events:
            if isinstance(event, Stored):
                assert not self.held[event.tier] & set(event.links), "announced twice"
                self.held[event.tier] |= set(event.links)
            elif isinstance(event, Removed):
                assert set(event.links) <= self.held[event.tier], "withdrawn without having been announced"
                self.held[event.tier] -= set(event.links)
            else:
                for links in self.held.values():
                    links.clear()


def begin(groups: int = 1, **options: Any) -> tuple[Told, Residency]:
    told = Told()
    residency = Residency(told, groups, PAGE, **options)
    residency.flush()
    assert told.batches == [[Cleared()]]
    told.batches.clear()
    return told, residency


def test_a_run_of_pages_is_one_event() -> None:
    told, residency = begin()
    residency.described(LINKS[:3], None, range(6), b"")
    for link in LINKS[:3]:
        residency.stored("l1", 0, link, "computed")
    residency.flush()
    assert told.batches == [[Stored("l1", LINKS[:3], None, [0, 1, 2, 3, 4, 5], PAGE, b"", "computed")]]


def test_a_boundary_counts_when_all_groups_have_it() -> None:
    told, residency = begin(groups=2)
    residency.described(LINKS[:1], None, [1, 2], b"")
    residency.stored("l1", 0, LINKS[0], "computed")
    residency.flush()
    assert told.batches == []
    residency.stored("l1", 1, LINKS[0], "computed")
    residency.flush()
    assert told.held["l1"] == {LINKS[0]}
    residency.removed("l1", 0, LINKS[0], "capacity")
    residency.flush()
    assert told.batches[-1] == [Removed("l1", [LINKS[0]], "capacity")]
    residency.removed("l1", 1, LINKS[0], "capacity")
    residency.flush()
    assert len(told.batches) == 2


def test_what_came_and_went_within_a_step_is_not_told() -> None:
    told, residency = begin()
    residency.described(LINKS[:2], None, range(4), b"")
    residency.stored("l1", 0, LINKS[0], "computed")
    residency.stored("l1", 0, LINKS[1], "computed")
    residency.removed("l1", 0, LINKS[1], "capacity")
    residency.flush()
    assert told.held["l1"] == {LINKS[0]}
    residency.removed("l1", 0, LINKS[0], "capacity")
    residency.stored("l1", 0, LINKS[0], "copied")
    residency.flush()
    assert len(told.batches) == 1


def test_a_page_without_text_waits_for_the_first_request_that_names_it() -> None:
    """L2 after a crash: slots are found again by their links, whose tokens nobody knows."""
    told, residency = begin()
    residency.stored("l2", 0, LINKS[1], "restored")
    residency.flush()
    assert told.batches == []
    residency.described(LINKS[:2], None, range(4), b"")
    residency.flush()
    assert told.batches == [[Stored("l2", [LINKS[1]], LINKS[0], [2, 3], PAGE, b"", "restored")]]


def test_an_emptied_cache_is_one_event_and_an_emptied_tier_is_not() -> None:
    told, residency = begin()
    residency.described(LINKS[:2], None, range(4), b"")
    for tier in ("l1", "l2"):
        residency.stored(tier, 0, LINKS[0], "computed")
    residency.flush()
    residency.removed("l1", 0, LINKS[0], "flush")
    residency.flush()
    assert told.batches[-1] == [Removed("l1", [LINKS[0]], "flush")]
    residency.removed("l2", 0, LINKS[0], "flush")
    residency.flush()
    assert told.batches[-1] == [Cleared()]


def test_tiers_that_nobody_asked_about_are_not_told() -> None:
    told, residency = begin(tiers=["l1"])
    residency.described(LINKS[:1], None, range(2), b"")
    residency.stored("l2", 0, LINKS[0], "copied")
    residency.flush()
    assert told.batches == []


@pytest.mark.property
@given(
    st.lists(
        st.one_of(
            st.just(("flush",)),
            st.tuples(
                st.sampled_from(["stored", "removed"]),
                st.sampled_from(["l1", "l2"]),
                st.integers(0, GROUPS - 1),
                st.integers(0, len(LINKS) - 1),
            ),
            st.tuples(st.just("described"), st.integers(1, len(LINKS))),
        ),
        max_size=60,
    )
)
def test_after_any_history_subscribers_know_exactly_what_is_there(history: list[Any]) -> None:
    told, residency = begin(groups=GROUPS)
    truth: dict[str, dict[bytes, set[int]]] = {tier: {link: set() for link in LINKS} for tier in ("l1", "l2")}
    named: set[bytes] = set()
    for what, *rest in [*history, ("flush",)]:
        if what == "flush":
            residency.flush()
            for tier, pages in truth.items():
                whole = {link for link, groups in pages.items() if len(groups) == GROUPS and link in named}
                assert told.held[tier] == whole
            assert residency.announced == sum(map(len, told.held.values()))
        elif what == "described":
            (count,) = rest
            residency.described(LINKS[:count], None, range(count * PAGE), b"")
            named |= set(LINKS[:count])
        else:
            tier, group, number = rest
            groups = truth[tier][LINKS[number]]
            if what == "stored" and group not in groups:
                groups.add(group)
                residency.stored(tier, group, LINKS[number], "computed")
            elif what == "removed" and group in groups:
                groups.discard(group)
                residency.removed(tier, group, LINKS[number], "capacity")
