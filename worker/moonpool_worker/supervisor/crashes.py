"""How often a crashing engine is started again."""

from __future__ import annotations

from collections import deque

#: So many crashes within so many seconds, and the supervisor gives up: the kubelet takes over.
LIMIT = 5
WINDOW = 600.0
#: Before the second restart in the window, doubled with each further one. All of them together stay well below the 60 s
#: that the liveness probe allows.
PAUSE = 1.0
#: From this crash in the window on, L2 starts empty: what is in it may be the reason.
SUSPECT = 3


class Crashes:
    """Times are seconds on the caller's monotonic clock."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque()
        self.total = 0

    def add(self, now: float) -> None:
        self.total += 1
        self._recent.append(now)
        while self._recent[0] <= now - WINDOW:
            self._recent.popleft()

    @property
    def gives_up(self) -> bool:
        return len(self._recent) >= LIMIT

    @property
    def pause(self) -> float:
        """Seconds until the next start; the first restart is at once."""
        restarts = len(self._recent)
        return PAUSE * 2 ** (restarts - 2) if restarts > 1 else 0.0

    @property
    def suspects_l2(self) -> bool:
        return len(self._recent) >= SUSPECT
