"""The node's own cgroup subtree: where it is, how a process joins it, how it's removed.

On cgroup v1 each controller is a hierarchy of its own, and the node gets one folder in each, below the folder that
this process is in. On cgroup v2 there is one folder. The v2 path is written from the kernel's documentation and has
not been run: the machine this was developed on has v1 only.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
V1_CONTROLLERS = ("cpu", "cpuacct", "cpuset", "memory", "devices", "freezer", "blkio", "pids", "systemd")


def is_v2(root: Path = ROOT) -> bool:
    return (root / "cgroup.controllers").exists()


def own_paths(text: str) -> dict[str, str]:
    """Parse `/proc/<pid>/cgroup` into {controller: path}; the v2 hierarchy has the key ''.

    `cpu,cpuacct` counts for both controllers, `name=systemd` is called systemd.
    """
    paths: dict[str, str] = {}
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            paths[controller.removeprefix("name=")] = path
    return paths


def node_groups(name: str, proc_cgroup: str, *, v2: bool, root: Path = ROOT) -> list[Path]:
    """The folders of a node's subtree for a process whose `/proc/self/cgroup` is given."""
    own = own_paths(proc_cgroup)
    leaf = f"moonpool-{name}"
    if v2:
        return [root / _above_our_own_node(own.get("", "/")).strip("/") / leaf]
    return [
        root / controller / _above_our_own_node(own[controller]).strip("/") / leaf
        for controller in V1_CONTROLLERS
        if controller in own
    ]


def _above_our_own_node(path: str) -> str:
    """Cut the path at a `moonpool-` folder, so that a node never nests in the group of another one."""
    kept: list[str] = []
    for part in path.split("/"):
        if part.startswith("moonpool-"):
            break
        kept.append(part)
    return "/".join(kept)


def create(groups: list[Path], *, v2: bool) -> None:
    """Make the folders ready to take processes."""
    for group in groups:
        group.mkdir(parents=True, exist_ok=True)
        if v2:
            _delegate_v2(group)
        elif "cpuset" in group.parts:
            # A new v1 cpuset is empty, and an empty cpuset takes no process.
            for name in ("cpuset.cpus", "cpuset.mems"):
                (group / name).write_text((group.parent / name).read_text())


def _delegate_v2(group: Path) -> None:
    """v2: the parent hands its controllers down. Only possible while the parent itself holds no process."""
    enabled = " ".join("+" + name for name in (group.parent / "cgroup.controllers").read_text().split())
    with contextlib.suppress(OSError):
        (group.parent / "cgroup.subtree_control").write_text(enabled)


def kill_members(groups: list[Path]) -> int:
    """SIGKILL every process of the subtree; returns how many were there.

    Only a node's own processes can be in these folders: nobody else is ever moved into them.
    """
    pids: set[int] = set()
    for group in groups:
        for procs in group.rglob("cgroup.procs") if group.exists() else ():
            with contextlib.suppress(OSError):
                pids.update(int(pid) for pid in procs.read_text().split())
    for pid in pids - {0, os.getpid()}:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return len(pids)


def remove(groups: list[Path], timeout: float = 10.0) -> list[Path]:
    """Remove the folders, deepest first, waiting for dying processes. Returns those that could not be removed."""
    deadline = time.monotonic() + timeout
    left = [group for group in groups if group.exists()]
    while left:
        for group in left:
            for folder in sorted(group.rglob("*"), key=lambda path: -len(path.parts)):
                if folder.is_dir():
                    with contextlib.suppress(OSError):
                        folder.rmdir()
            with contextlib.suppress(OSError):
                group.rmdir()
        left = [group for group in left if group.exists()]
        if not left or time.monotonic() > deadline:
            break
        time.sleep(0.1)
    return left
