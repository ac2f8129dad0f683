"""The arithmetic of a rolling update: how many pods each revision gets next.

Pure, total and memoryless: a crash, an edit in mid-roll or a lost pod only changes the numbers that go in. Promises,
for every input: at no time fewer than ``desired - max_unavailable`` available pods by our own doing, and never more
than ``desired + max_surge`` pods in all, those that are still terminating included (an accelerator is free only when
its pod is gone).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class RevisionCount:
    """Pods of one revision.

    ``replicas`` is asked for, ``pods`` exist and are not terminating (the ReplicaSet's controller may be behind),
    ``ready`` of them pass their readiness, ``available`` of those are routed to by every gateway.
    """

    name: str
    replicas: int
    ready: int
    available: int
    pods: int = 0

    @property
    def held(self) -> int:
        """Pods that exist or are about to."""
        return max(self.replicas, self.pods)

    @property
    def sure(self) -> int:
        """Available pods that a removal already asked for can't touch: it may hit them before the unlisted ones."""
        return max(0, self.available - max(0, self.ready - self.replicas))


@dataclass(frozen=True)
class Limits:
    desired: int
    max_surge: int
    max_unavailable: int

    @property
    def floor(self) -> int:
        """Available pods that must remain."""
        return max(0, self.desired - self.max_unavailable)

    @property
    def ceiling(self) -> int:
        """Pods that may exist."""
        return self.desired + self.max_surge


def next_counts(new: RevisionCount, old: Sequence[RevisionCount], terminating: int, limits: Limits) -> dict[str, int]:
    """Replicas by revision name. ``old`` is oldest first; ``terminating`` pods of any revision still hold resources."""
    counts = {each.name: each.replicas for each in old}
    if not any(each.held for each in old) and terminating == 0:
        return counts | {new.name: limits.desired}
    return counts | _shrink(new, old, limits) | {new.name: _grow(new, old, terminating, limits)}


def _grow(new: RevisionCount, old: Sequence[RevisionCount], terminating: int, limits: Limits) -> int:
    if new.replicas >= limits.desired:
        return limits.desired
    room = limits.ceiling - terminating - new.held - sum(each.held for each in old)
    return min(limits.desired, new.replicas + max(0, room))


def _shrink(new: RevisionCount, old: Sequence[RevisionCount], limits: Limits) -> dict[str, int]:
    """Old revisions give up first what serves nobody, then as much as the floor allows, oldest revision first."""
    # Unready old pods cost nothing to remove, and a ReplicaSet removes unready pods before ready ones. Ready pods
    # that no gateway lists yet stay: the ReplicaSet might pick a listed one in their place.
    kept = {each.name: min(each.replicas, each.ready) for each in old}
    spare = new.sure + sum(each.sure for each in old) - limits.floor
    for each in old:
        gone = min(kept[each.name], max(0, spare))
        kept[each.name] -= gone
        spare -= gone
    return kept


def complete(new: RevisionCount, old_pods: int, desired: int) -> bool:
    """All wanted workers of the new revision serve, and no pod of another one exists, terminating ones included."""
    return old_pods == 0 and new.replicas == desired and new.available >= desired
