"""When what happened to a request: the stations of its way, on the engine's clock."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass(slots=True)
class Timeline:
    """Monotonic seconds; 0 for what has not happened. Each call marks now."""

    received: float = field(default_factory=time.monotonic)
    first_admitted: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0
    preemptions: int = 0
    _fetched: float = 0.0
    _preempted: float = 0.0
    _fetch_began: float = 0.0
    _preempted_at: float = 0.0

    def fetching(self) -> None:
        self._fetch_began = time.monotonic()

    def fetched(self) -> None:
        """Nobody waits for L3 any more. Twice is once."""
        if self._fetch_began:
            self._fetched += time.monotonic() - self._fetch_began
            self._fetch_began = 0.0

    def admitted(self) -> None:
        now = time.monotonic()
        self.first_admitted = self.first_admitted or now
        if self._preempted_at:
            self._preempted += now - self._preempted_at
            self._preempted_at = 0.0

    def preempted(self) -> None:
        self.preemptions += 1
        self._preempted_at = time.monotonic()

    def produced(self, now: float) -> None:
        """A token, at ``now``."""
        self.first_token = self.first_token or now
        self.last_token = now

    @property
    def fetch_seconds(self) -> float:
        """How long it has waited for L3."""
        began = self._fetch_began  # The engine's thread may end the wait at this very moment.
        return self._fetched + (time.monotonic() - began if began else 0.0)

    @property
    def preempt_seconds(self) -> float:
        """How long it has been without blocks after it gave them back."""
        at = self._preempted_at
        return self._preempted + (time.monotonic() - at if at else 0.0)

    def epoch(self, moment: float) -> float:
        """Seconds since 1970 of one of the moments above; 0 for what has not happened."""
        return moment and time.time() - (time.monotonic() - moment)
