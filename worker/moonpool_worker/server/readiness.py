"""Whether this worker may take traffic, and why not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moonpool_worker.server.worker import Worker


@dataclass(frozen=True, slots=True)
class Verdict:
    """``reason``: "", Loading, NamespaceNotVerified, Draining or EngineDead."""

    ready: bool
    reason: str = ""
    message: str = ""

    def body(self) -> dict[str, Any]:
        return {"ready": True} if self.ready else {"ready": False, "reason": self.reason, "message": self.message}


class Readiness:
    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def check(self) -> Verdict:
        worker = self._worker
        if worker.dead:
            return Verdict(False, "EngineDead", worker.dead)
        loaded = worker.loaded
        if loaded is None or worker.engine is None:
            return Verdict(False, "Loading", worker.progress)
        if worker.drain.state != "serving":
            return Verdict(False, "Draining", f"draining: {worker.drain.state}")
        if worker.settings.podinfo is not None:
            verified = worker.grants.verified
            if not verified:
                return Verdict(
                    False, "NamespaceNotVerified", "the operator has not verified this worker's namespace yet"
                )
            if verified != loaded.namespace:
                return Verdict(
                    False,
                    "NamespaceNotVerified",
                    f"the operator verified namespace {verified[:16]}…, this worker loaded {loaded.namespace[:16]}…",
                )
        return Verdict(True)
