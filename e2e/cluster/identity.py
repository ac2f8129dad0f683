"""Process identity that survives pid reuse: a pid counts as ours only with the start time we recorded."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path


def start_time(pid: int, proc: Path = Path("/proc")) -> int | None:
    """Clock ticks after boot at which the process began (field 22 of `stat`), None if there is none.

    A zombie counts as gone: it has ended and only waits for its parent.
    """
    try:
        text = (proc / str(pid) / "stat").read_text()
    except OSError:
        return None
    # The command name is in parentheses and may itself hold spaces and parentheses.
    fields = text[text.rindex(")") + 2 :].split()
    return None if fields[0] in "ZX" else int(fields[19])


def is_alive(pid: int, started: int) -> bool:
    return pid > 0 and start_time(pid) == started


def kill(pid: int, started: int, timeout: float = 10.0) -> bool:
    """SIGKILL exactly that process and wait for its end. True when it's gone."""
    deadline = time.monotonic() + timeout
    while is_alive(pid, started):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
