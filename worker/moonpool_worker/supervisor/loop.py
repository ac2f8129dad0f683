"""Start the engine process, pass signals on, and start another one over the same L2 when it crashes."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Sequence

from moonpool_worker.supervisor.crashes import WINDOW, Crashes
from moonpool_worker.supervisor.handover import Supervised

_PR_SET_CHILD_SUBREAPER = 36
_EXIT_ENGINE_DEAD = 1
_TERMINATION_LOG = "/dev/termination-log"
_PASSED_ON = (signal.SIGTERM, signal.SIGINT)
_SIGNALS = {*_PASSED_ON, signal.SIGCHLD}


def supervise(command: Sequence[str]) -> int:
    """Run ``command`` until it ends by itself, is told to, or has crashed too often; returns its exit code.

    A death by a signal, or exit code 1 (the engine died), is a crash; 0 and 2 (cannot start) are not. 128 + N stands
    for signal N. The engine has a process group of its own, so that a signal to the whole group, as a terminal sends
    it, reaches it once.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    # Processes that the engine leaves behind become this one's children: their end can be waited for.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    memory = _new_memory()
    crashes = Crashes()
    while True:
        code, told = _run(command, Supervised(memory, crashes.total, os.getpid()))
        if told or (code >= 0 and code != _EXIT_ENGINE_DEAD):
            return _exit_code(code)
        crashes.add(time.monotonic())
        if crashes.gives_up:
            _say(f"the engine crashed too often in {WINDOW:.0f} s, the last time by {_reason(code)}")
            return _exit_code(code)
        if crashes.suspects_l2:
            os.close(memory)
            memory = _new_memory()
        _log(crashes, _reason(code))
        if crashes.pause and (number := _stop_signal_within(crashes.pause)):
            return 128 + number


def _run(command: Sequence[str], handover: Supervised) -> tuple[int, bool]:
    """One engine process from its start to the end of everything that it started.

    Returns its exit code, negative for a signal, and whether it had been told to stop.
    """
    engine = os.posix_spawn(
        command[0], list(command), os.environ | handover.environment(), setpgroup=0, setsigmask=(), setsigdef=_PASSED_ON
    )
    told = False
    status: int | None = None
    while status is None:
        number = signal.sigwait(_SIGNALS)
        if number == signal.SIGCHLD:
            status = _reap(engine)
        else:
            told = True
            os.kill(engine, number)
    # The L3 client writes to L2: nobody may start on the memory before it is gone for certain.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(engine, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-engine, 0)
    return os.waitstatus_to_exitcode(status), told


def _reap(engine: int) -> int | None:
    """Take note of every child that has ended; the engine's status when it is among them."""
    found = None
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            if pid == engine:
                found = status
    return found


def _stop_signal_within(seconds: float) -> int | None:
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        information = signal.sigtimedwait(_SIGNALS, left)
        if information is not None and information.si_signo != signal.SIGCHLD:
            return information.si_signo
    return None


def _new_memory() -> int:
    """An empty memfd that children inherit; the engine gives it its size."""
    return os.memfd_create("moonpool-l2", 0)


def _exit_code(code: int) -> int:
    return code if code >= 0 else 128 - code


def _reason(code: int) -> str:
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name


def _log(crashes: Crashes, reason: str) -> None:
    line = {
        "event": "the engine crashed and is started again",
        "reason": reason,
        "crashes": crashes.total,
        "pause": crashes.pause,
        "l2": "empty" if crashes.suspects_l2 else "kept",
        "level": "error",
    }
    print(json.dumps(line), file=sys.stderr, flush=True)


def _say(sentence: str) -> None:
    print(f"moonpool-worker: {sentence}", file=sys.stderr, flush=True)
    if os.path.exists(_TERMINATION_LOG):
        with contextlib.suppress(OSError), open(_TERMINATION_LOG, "w") as log:
            log.write(sentence)
