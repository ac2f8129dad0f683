"""When what happened to a request: the stations of its way, on the engine's clock."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass(slots=True)
class Timeline:
    """Monotonic seconds; 0 for what has not happened. Each call marks now.

    ``fetch_seconds``: waited for L3. ``preempt_seconds``: between giving its blocks back and being admitted again.
    """

    received: float = field(default_factory=time.monotonic)
    first_admitted: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0
    fetch_seconds: float = 0.0
    preempt_seconds: float = 0.0
    preemptions: int = 0
    _fetch_began: float = 0.0
    _preempted_at: float = 0.0

    def fetching(self) -> None:
        self._fetch_began = time.monotonic()

    def fetched(self) -> None:
        """Nobody waits for L3 any more. Twice is once."""
        if self._fetch_began:
            self.fetch_seconds += time.monotonic() - self._fetch_began
            self._fetch_began = 0.0

    def admitted(self) -> None:
        now = time.monotonic()
        self.first_admitted = self.first_admitted or now
        if self._preempted_at:
            self.preempt_seconds += now - self._preempted_at
            self._preempted_at = 0.0

    def preempted(self) -> None:
        self.preemptions += 1
        self._preempted_at = time.monotonic()

    def produced(self, now: float) -> None:
        """A token, at ``now``."""
        self.first_token = self.first_token or now
        self.last_token = now

    def epoch(self, moment: float) -> float:
        """Seconds since 1970 of one of the moments above; 0 for what has not happened."""
        return moment and time.time() - (time.monotonic() - moment)
