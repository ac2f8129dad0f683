"""A circuit breaker: after repeated faults the store is left alone, then tried with one call at a time."""

from __future__ import annotations

CLOSED, OPEN, HALF_OPEN = "closed", "open", "half-open"


class Breaker:
    """Opens after ``threshold`` faults in a row, for ``pause`` seconds, doubled each time up to ``max_pause``.

    Open: no calls but a probe once :meth:`probe_due`. A probe that succeeds leads to half-open, where one real call
    at a time decides. All times are seconds on the caller's monotonic clock.
    """

    def __init__(self, threshold: int = 3, pause: float = 1.0, max_pause: float = 15.0) -> None:
        self.state = CLOSED
        self.opened = 0
        self._threshold = threshold
        self._first_pause = pause
        self._pause = pause
        self._max_pause = max_pause
        self._faults = 0
        self._until = 0.0

    def allows(self, in_flight: int) -> bool:
        """Whether a real call may start while ``in_flight`` others have not been answered."""
        return self.state == CLOSED or (self.state == HALF_OPEN and in_flight == 0)

    def probe_due(self, now: float) -> bool:
        return self.state == OPEN and now >= self._until

    def probe_succeeded(self) -> None:
        if self.state == OPEN:
            self.state = HALF_OPEN

    def succeeded(self) -> None:
        # Calls from before the breaker opened may still be answered: only the trial in half-open closes it.
        if self.state == OPEN:
            return
        self.state = CLOSED
        self._faults = 0
        self._pause = self._first_pause

    def failed(self, now: float, certain: bool = False) -> None:
        """``certain``: as good as ``threshold`` faults."""
        self._faults += self._threshold if certain else 1
        if self.state == CLOSED and self._faults < self._threshold:
            return
        if self.state == OPEN and now < self._until:
            return
        if self.state == CLOSED:
            self._pause = self._first_pause
        self.state = OPEN
        self.opened += 1
        self._until = now + self._pause
        self._pause = min(2 * self._pause, self._max_pause)

    def reset(self) -> None:
        self.state = CLOSED
        self._faults = 0
        self._pause = self._first_pause
