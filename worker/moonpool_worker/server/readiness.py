"""Whether this worker may take traffic, and why not."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moonpool_worker.server.worker import Worker

#: A gateway (smg 1.13.0) drains a worker that is not ready for 5 s and does not see it come back within that time: one
#: that returns faster gets no requests until the next resync, 50 s later. Two failed probes take up to 4 s.
RETURN_AFTER = 10.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """``reason``: "", Loading, NamespaceNotVerified, Returning, Draining or EngineDead."""

    ready: bool
    reason: str = ""
    message: str = ""

    def body(self) -> dict[str, Any]:
        return {"ready": True} if self.ready else {"ready": False, "reason": self.reason, "message": self.message}


class Readiness:
    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._started = time.monotonic()

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
            supervised = worker.settings.supervised
            if supervised is not None and supervised.crashes and time.monotonic() < self._started + RETURN_AFTER:
                return Verdict(False, "Returning", "the engine was restarted too fast for the gateway to notice")
        return Verdict(True)
