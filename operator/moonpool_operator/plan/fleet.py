"""Counting workers: which exist, which are ready, and which of those every gateway sends requests to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

from moonpool_operator.observe.model import GatewayView, Pod, ServiceObservation
from moonpool_operator.plan.rollout import RevisionCount


@dataclass(frozen=True)
class Fleet:
    """The workers of a service, sorted out. Pods on lost nodes and pods that have ended are in none of the lists."""

    live: tuple[Pod, ...]
    leaving: tuple[Pod, ...]
    listed: frozenset[str]

    def of(self, revision: str) -> list[Pod]:
        return [pod for pod in self.live if pod.revision == revision]

    def others(self, revision: str) -> list[Pod]:
        """Pods of every other revision, those that are leaving too."""
        return [pod for pod in (*self.live, *self.leaving) if pod.revision != revision]

    def exists(self, revision: str) -> bool:
        return any(pod.revision == revision for pod in (*self.live, *self.leaving))

    def count(self, revision: str, replicas: int) -> RevisionCount:
        own = self.of(revision)
        ready = [pod for pod in own if serves(pod)]
        available = [pod for pod in ready if pod.name in self.listed]
        return RevisionCount(revision, replicas, len(ready), len(available), len(own))


def serves(pod: Pod) -> bool:
    return pod.ready and pod.gate is True


def sort_out(seen: ServiceObservation, now: datetime, lost_pod_deadline: float) -> Fleet:
    there = [pod for pod in seen.workers if not pod.finished and not pod.lost(now, lost_pod_deadline)]
    live = tuple(pod for pod in there if not pod.terminating)
    leaving = tuple(pod for pod in there if pod.terminating)
    return Fleet(live, leaving, frozenset(pod.name for pod in live if is_listed(pod, seen.gateways, seen.views)))


def is_listed(pod: Pod, gateways: Iterable[Pod], views: Sequence[GatewayView]) -> bool:
    """Does every gateway route to the pod? A gateway that starts and does not answer yet routes nothing anyway."""
    starting = {gateway.name for gateway in gateways if not gateway.ready}
    asked = [view for view in views if view.workers is not None or view.pod not in starting]
    return bool(asked) and all(view.workers is not None and pod.ip in view.workers for view in asked)
