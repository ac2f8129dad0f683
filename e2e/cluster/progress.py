"""Progress lines: what is being done, for how long, and what is being waited for.

On a terminal the current stage is a live line; elsewhere (CI logs, pipes) one plain line is written when a stage
begins to take long and one when it ends.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

HEARTBEAT_SECONDS = 15.0


class Stage:
    """One running stage. Call `note` with what is being waited for; it's cheap to call often."""

    def __init__(self, progress: Progress, title: str) -> None:
        self._progress = progress
        self._title = title
        self._started = time.monotonic()
        self._last_plain = self._started
        self._live = progress.console.status(title) if progress.console.is_terminal else None
        if self._live:
            self._live.start()

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._started

    def note(self, waiting_for: str) -> None:
        """Say what the stage is waiting for right now."""
        line = f"{self._title} [{self.elapsed:.0f} s] {waiting_for}"
        if self._live:
            self._live.update(line)
        elif time.monotonic() - self._last_plain >= HEARTBEAT_SECONDS:
            self._last_plain = time.monotonic()
            self._progress.say(line)

    def stop(self) -> None:
        if self._live:
            self._live.stop()


class Progress:
    """Writes progress to standard error, so that standard output stays machine readable."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True, highlight=False, soft_wrap=True)

    def say(self, line: str) -> None:
        self.console.print(line, markup=False)

    @contextmanager
    def stage(self, title: str) -> Iterator[Stage]:
        """Run one stage; print its outcome and how long it took."""
        stage = Stage(self, title)
        try:
            yield stage
        except BaseException:
            stage.stop()
            self.say(f"FAILED {title} after {stage.elapsed:.1f} s")
            raise
        stage.stop()
        self.say(f"{title}: {stage.elapsed:.1f} s")
