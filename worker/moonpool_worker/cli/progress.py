"""Loading, as a bar on a terminal and as a few plain lines elsewhere."""

from __future__ import annotations

import sys
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

#: A log is told at each of these parts.
_STEP = 25


class LoadProgress:
    """``update`` may be called from the loading thread."""

    def __init__(self) -> None:
        self._bar: Progress | None = None
        self._last = ("", -1)
        if sys.stderr.isatty():
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.percentage:>3.0f} %"),
                TimeElapsedColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            self._task = self._bar.add_task("starting", total=None)

    def __enter__(self) -> LoadProgress:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.finish()

    def update(self, what: str, done: int, total: int) -> None:
        """``total`` 0: unknown."""
        if self._bar:
            self._bar.update(self._task, description=what, completed=done, total=total or None)
            return
        percent = 100 * done // total // _STEP * _STEP if total else 0
        if (what, percent) != self._last:
            self._last = (what, percent)
            print(f"{what}: {percent} %" if total else what, file=sys.stderr, flush=True)

    def finish(self) -> None:
        """Take the bar off the screen. Twice is once."""
        if self._bar:
            self._bar.stop()
            self._bar = None
        self._last = ("", -1)
