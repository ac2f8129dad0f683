"""A pid counts as ours only with the start time that was recorded."""

import os
import subprocess

from e2e.cluster import identity


def test_start_time_survives_parentheses_and_spaces_in_the_name(tmp_path):
    (tmp_path / "7").mkdir()
    after = " ".join(["S"] + [str(number) for number in range(4, 23)])
    (tmp_path / "7/stat").write_text(f"7 (evil) name ) {after}\n")
    assert identity.start_time(7, tmp_path) == 22


def test_a_zombie_is_gone(tmp_path):
    (tmp_path / "7").mkdir()
    (tmp_path / "7/stat").write_text("7 (x) Z " + " ".join("0" for _ in range(30)) + "\n")
    assert identity.start_time(7, tmp_path) is None


def test_another_process_under_the_same_pid_is_not_ours():
    started = identity.start_time(os.getpid())
    assert identity.is_alive(os.getpid(), started)
    assert not identity.is_alive(os.getpid(), started + 1)
    assert identity.kill(os.getpid(), started + 1), "a pid with another start time must never be killed"


def test_kill_ends_exactly_that_process():
    child = subprocess.Popen(["sleep", "60"])
    started = identity.start_time(child.pid)
    assert identity.kill(child.pid, started)
    child.wait()
