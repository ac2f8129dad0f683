"""The supervisor with small programs in the engine's place."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

#: Runs the supervisor over the program in argv[1], without waiting between restarts.
SUPERVISOR = """
import sys
from moonpool_worker.supervisor import crashes, loop
crashes.PAUSE = 0.01
sys.exit(loop.supervise([sys.executable, "-c", sys.argv[1], *sys.argv[2:]]))
"""
#: What each of the programs begins with: `note(words)` writes a line to the file in argv[1].
BEGINNING = """
import os, signal, subprocess, sys, time
from moonpool_worker.supervisor.handover import Supervised
me = Supervised.from_environment()
def note(*words):
    with open(sys.argv[1], "a") as file:
        print(*words, file=file)
"""


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    return tmp_path / "notes"


def begin(program: str, notes: Path, **options: object) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", SUPERVISOR, BEGINNING + program, str(notes)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, **options)  # type: ignore[call-overload]


def run(program: str, notes: Path) -> tuple[int, list[str], str]:
    process = begin(program, notes)
    _, errors = process.communicate(timeout=60)
    return process.returncode, notes.read_text().splitlines(), errors.decode()


def wait_for(notes: Path, lines: int) -> list[str]:
    deadline = time.monotonic() + 30
    while not notes.exists() or len(notes.read_text().splitlines()) < lines:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return notes.read_text().splitlines()


@pytest.mark.parametrize("code", [0, 2, 130])
def test_an_end_that_is_no_crash_is_the_end(code: int, notes: Path) -> None:
    assert run(f"note(me.crashes); sys.exit({code})", notes)[:2] == (code, ["0"])


@pytest.mark.parametrize("death", ["os._exit(1)", "os.kill(os.getpid(), signal.SIGKILL)", "os.abort()"])
def test_a_crash_starts_another_over_the_same_memory(death: str, notes: Path) -> None:
    program = f"""
if not me.crashes:
    os.ftruncate(me.l2_fd, 4096)
    os.pwrite(me.l2_fd, b"kept", 100)
    {death}
note(me.crashes, os.pread(me.l2_fd, 4, 100).decode())
"""
    code, lines, errors = run(program, notes)
    assert (code, lines) == (0, ["1 kept"])
    assert "crashed" in errors


def test_it_gives_up_with_the_last_exit_code_and_tries_an_empty_memory_before(notes: Path) -> None:
    program = """
size = os.fstat(me.l2_fd).st_size
os.ftruncate(me.l2_fd, 1)
note(me.crashes, size)
os.kill(os.getpid(), signal.SIGSEGV)
"""
    code, lines, errors = run(program, notes)
    assert code == 128 + signal.SIGSEGV
    assert lines == ["0 0", "1 1", "2 1", "3 0", "4 0"]
    assert "crashed too often" in errors
    assert "SIGSEGV" in errors


def test_what_a_dead_engine_left_is_gone_before_the_next_starts(notes: Path) -> None:
    """As the L3 client: a process that would go on writing to L2."""
    program = """
if not me.crashes:
    left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=False)
    note(left.pid)
    os.kill(os.getpid(), signal.SIGKILL)
pid = int(open(sys.argv[1]).read())
note(os.path.exists(f"/proc/{pid}"))
"""
    code, lines, _ = run(program, notes)
    assert code == 0
    assert lines[1] == "False"


def test_a_stop_signal_reaches_the_engine_once_and_its_code_counts(notes: Path) -> None:
    program = """
count = 0
def stop(number, frame):
    global count
    count += 1
signal.signal(signal.SIGTERM, stop)
note("ready")
while not count:
    time.sleep(0.01)
time.sleep(0.3)
note(count)
os._exit(1)
"""
    process = begin(program, notes, start_new_session=True)
    wait_for(notes, 1)
    # The whole group, as a terminal or a service manager does it.
    os.killpg(process.pid, signal.SIGTERM)
    process.communicate(timeout=30)
    # Exit code 1 would be a crash if it had not been told to stop.
    assert process.returncode == 1
    assert notes.read_text().splitlines() == ["ready", "1"]


def test_no_engine_outlives_its_supervisor(notes: Path) -> None:
    process = begin("me.end_with_parent(); note(os.getpid()); time.sleep(60)", notes)
    pid = int(wait_for(notes, 1)[0])
    process.kill()
    process.communicate(timeout=30)
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}/status").exists() and "zombie" not in Path(f"/proc/{pid}/status").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_it_is_small(notes: Path) -> None:
    """Every byte of it is one that L2 cannot have. 11 MB measured, 5 MB of them its own."""
    process = begin("me.end_with_parent(); note('up'); time.sleep(60)", notes)
    wait_for(notes, 1)
    status = Path(f"/proc/{process.pid}/status").read_text()
    process.kill()
    process.communicate(timeout=30)
    (resident,) = (int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))
    assert resident < 16_000
