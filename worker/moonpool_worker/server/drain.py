"""How a worker leaves without dropping a request: announce, refuse, finish, cut what is late, close L3."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import structlog

if TYPE_CHECKING:
    from moonpool_worker.server.worker import Worker

#: The gateway takes one to two seconds to notice that a worker is not ready; until then requests are answered.
ANNOUNCE_SECONDS = 3.0
_LAST_WORDS = 2.0

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class DrainReport:
    """API calls that ended by themselves since the drain began, and those cut at its deadline."""

    finished: int
    cut: int
    seconds: float

    def body(self) -> dict[str, Any]:
        return {
            "state": "drained",
            "finished": self.finished,
            "cut": self.cut,
            "seconds": round(self.seconds, 3),
        }


class Drain:
    """Happens once; whoever asks again joins it. A later, shorter deadline is not taken over."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._task: asyncio.Task[DrainReport] | None = None
        self.state: Literal["serving", "announced", "refusing", "drained"] = "serving"
        self.finished = 0

    @property
    def refusing(self) -> bool:
        return self.state in ("refusing", "drained")

    async def run(self, timeout: float, announce: float = ANNOUNCE_SECONDS) -> DrainReport:
        """Begin or join the drain, and return when it is over. Seconds."""
        if self._task is None:
            self._task = asyncio.create_task(self._drain(timeout, announce), name="drain")
        return await asyncio.shield(self._task)

    async def _until_idle(self, deadline: float) -> None:
        """Return when no call is active, or at ``deadline`` (monotonic seconds)."""
        worker = self._worker
        while worker.active and (left := deadline - time.monotonic()) > 0:
            worker.calls_changed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(worker.calls_changed.wait(), left)

    async def _drain(self, timeout: float, announce: float) -> DrainReport:
        worker = self._worker
        started = time.monotonic()
        self.state = "announced"
        _log.info("draining", active=len(worker.active), timeout=timeout)
        await asyncio.sleep(min(announce, timeout) if timeout > 0 else 0)
        self.state = "refusing"
        await self._until_idle(started + timeout)
        cut = len(worker.active)
        for call in list(worker.active):
            call.cut(f"the worker was told to stop, and its drain timeout of {timeout:g} s is over")
        # The cut calls still have to tell their clients.
        await self._until_idle(time.monotonic() + _LAST_WORDS)
        await worker.grants.close()
        self.state = "drained"
        report = DrainReport(self.finished, cut, time.monotonic() - started)
        worker.metrics.drain_finished.set(report.finished)
        worker.metrics.drain_cut.set(report.cut)
        _log.info("drained", finished=report.finished, cut=report.cut, seconds=round(report.seconds, 3))
        return report
