"""What the supervisor tells the engine process that it starts, in one environment variable."""

from __future__ import annotations

import ctypes
import json
import os
import signal
from collections.abc import Sequence

VARIABLE = "MOONPOOL_SUPERVISED"
_PR_SET_PDEATHSIG = 1


class Supervised:
    """``l2_fd``: the memfd that outlives a crash. ``crashes``: how many engine processes of this worker have crashed.

    ``parent``: the supervisor's process id.
    """

    __slots__ = ("crashes", "l2_fd", "parent")

    def __init__(self, l2_fd: int, crashes: int, parent: int) -> None:
        self.l2_fd, self.crashes, self.parent = l2_fd, crashes, parent

    def environment(self) -> dict[str, str]:
        return {VARIABLE: json.dumps({"l2_fd": self.l2_fd, "crashes": self.crashes, "parent": self.parent})}

    @classmethod
    def from_environment(cls) -> Supervised | None:
        """None in a process that no supervisor started."""
        text = os.environ.get(VARIABLE)
        return cls(**json.loads(text)) if text else None

    def end_with_parent(self) -> None:
        """In the engine process: no engine outlives its supervisor, which may be killed without a word."""
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != self.parent:
            os._exit(1)


def wants_supervisor(arguments: Sequence[str]) -> bool:
    """Whether this command line is to be run under a supervisor, which this process becomes."""
    return arguments[:1] == ["serve"] and "--no-supervise" not in arguments and VARIABLE not in os.environ
