"""How long a prefix can be reused, when every cache group has its own opinion.

A group's matcher finds the longest boundary, in pages, that the group could be resumed from. The joint boundary is the
longest that all agree on: the groups that keep all of the text bound it first, then the others lower it in turn until
none does, a fixpoint that does not depend on their order. (The composition is TokenSpeed's, 2026.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moonpool_worker.cache.cache_group import CacheGroup

#: Whether page ``position`` of group ``group`` is present: ``has(group, position)``.
Has = Callable[[int, int], bool]


@dataclass(frozen=True, slots=True)
class Match:
    """``boundary``: pages that all groups can be resumed behind; ``agreed``: pages that those that keep all have."""

    boundary: int
    agreed: int


@dataclass(frozen=True, slots=True)
class FetchPlan:
    """``wanted``: the (group, position) that are missing for a hit of ``boundary`` pages, in order of position."""

    boundary: int
    wanted: list[tuple[int, int]]


def longest_prefix(group: int, pages: int, has: Has) -> int:
    """Left to right: the pages before the first that is missing."""
    for position in range(pages):
        if not has(group, position):
            return position
    return pages


def longest_run(group: int, run: int, pages: int, has: Has) -> int:
    """Right to left: the highest boundary with ``run`` pages before it, or as many as there are."""
    boundary = position = pages
    while position > max(0, boundary - run):
        position -= 1
        if not has(group, position):
            boundary = position
    return boundary


class Composition:
    """The matchers of all groups."""

    def __init__(self, groups: Sequence[CacheGroup]) -> None:
        self._closed = [group for group in groups if group.closed]
        self._open = [group for group in groups if not group.closed]
        self._groups = list(groups)

    def joint(self, pages: int, has: Has) -> Match:
        """The best boundary among the first ``pages`` pages."""
        agreed = min((longest_prefix(group.index, pages, has) for group in self._closed), default=pages)
        return self.below(agreed, has)

    def below(self, agreed: int, has: Has) -> Match:
        """The best boundary when the closed groups have ``agreed`` pages."""
        bound, before = agreed, -1
        while bound != before:
            before = bound
            for group in self._open:
                bound = longest_run(group.index, group.run, bound, has)
        return Match(bound, agreed if self._closed else bound)

    def needs(self, group: int, boundary: int) -> range:
        """The positions of a group that a hit of ``boundary`` pages reads."""
        run = self._groups[group].run
        return range(max(0, boundary - run) if run else 0, boundary)

    def unknown(self, pages: int, has: Has) -> list[tuple[int, int]]:
        """What is missing and could take part in a longer hit than today's: what to ask the store for."""
        boundary = self.joint(pages, has).boundary
        missing = []
        for position in range(pages):
            for group in self._groups:
                # The shortest better boundary is one page more; a run before it reaches back from there.
                begin = max(0, boundary + 1 - group.run) if group.run else 0
                if position >= begin and not has(group.index, position):
                    missing.append((group.index, position))
        return missing

    def plan_fetch(self, pages: int, here: Has, stored: Has) -> FetchPlan:
        """What to bring for the longest hit that ``here`` and ``stored`` together could give."""
        boundary = self.joint(pages, lambda group, at: here(group, at) or stored(group, at)).boundary
        wanted = [
            (group.index, position)
            for group in self._groups
            for position in self.needs(group.index, boundary)
            if not here(group.index, position)
        ]
        return FetchPlan(boundary, sorted(wanted, key=lambda item: (item[1], item[0])))
