"""The private node: a process tree in namespaces of its own, with its own cgroup subtree.

`node.json` is written before the first thing is created and says everything that `down` has to remove, so that a
crash at any point, a `kill -9` included, can be cleaned up.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from e2e.cluster import cgroups, identity, network, settings
from e2e.cluster.errors import ClusterError

NAMESPACE_FLAGS = ("--mount", "--cgroup", "--net", "--uts", "--ipc", "--pid")
BOOT_SECONDS = 15.0


@dataclass
class NodeRecord:
    """What exists of a node, as stored in `node.json`. Pid 0: not started yet."""

    name: str
    interface: str
    groups: list[str]
    launcher: int = 0
    launcher_started: int = 0
    pid: int = 0
    pid_started: int = 0
    components: dict[str, int] = field(default_factory=dict)

    @property
    def group_paths(self) -> list[Path]:
        return [Path(group) for group in self.groups]

    @property
    def alive(self) -> bool:
        return identity.is_alive(self.pid, self.pid_started)

    def save(self, layout: settings.Layout) -> None:
        layout.state.mkdir(parents=True, exist_ok=True)
        scratch = layout.node_record.with_suffix(".tmp")
        scratch.write_text(json.dumps(asdict(self), indent=1) + "\n")
        scratch.replace(layout.node_record)


def load(layout: settings.Layout) -> NodeRecord | None:
    """The record of a node, None if there is none (or only a damaged one)."""
    try:
        return NodeRecord(**json.loads(layout.node_record.read_text()))
    except (OSError, ValueError, TypeError):
        return None


def start(layout: settings.Layout) -> NodeRecord:
    """Start the node's process 1 and connect the host to it. Raises ClusterError."""
    network.refuse_taken_routes(layout.host_interface)
    v2 = cgroups.is_v2()
    own = Path("/proc/self/cgroup").read_text()
    groups = cgroups.node_groups(layout.name, own, v2=v2)
    record = NodeRecord(layout.name, layout.host_interface, [str(group) for group in groups])
    record.save(layout)
    cgroups.create(groups, v2=v2)
    layout.logs.mkdir(parents=True, exist_ok=True)
    ready = layout.state / "node-booted"
    ready.unlink(missing_ok=True)
    init = [str(settings.PACKAGE / "node-init.sh"), layout.name, settings.NODE_IP]
    init += [str(settings.NODE_NET_PREFIX), str(ready)]
    command = ["unshare", *NAMESPACE_FLAGS, "--fork", "--kill-child", "--mount-proc", *init]
    log = layout.logs / "init.log"
    with log.open("wb") as out:
        launcher = subprocess.Popen(
            _join(record.group_paths, command),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    record.launcher, record.launcher_started = launcher.pid, identity.start_time(launcher.pid) or 0
    record.save(layout)
    _await_boot(record, launcher, ready, log)
    record.save(layout)
    network.connect_host(record.interface, record.pid)
    return record


def _await_boot(record: NodeRecord, launcher: subprocess.Popen, ready: Path, log: Path) -> None:
    deadline = time.monotonic() + BOOT_SECONDS
    while not ready.exists():
        if launcher.poll() is not None or time.monotonic() > deadline:
            raise ClusterError(f"the node's namespaces did not come up, see {log}:\n{log.read_text()[-1500:]}")
        time.sleep(0.02)
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    record.pid = int(children[0])
    record.pid_started = identity.start_time(record.pid) or 0


def exec_argv(record: NodeRecord, argv: Sequence[str]) -> list[str]:
    """The host command that runs `argv` on the node, inside its cgroups."""
    enter = ["nsenter", "-t", str(record.pid), "-m", "-C", "-n", "-u", "-i", "-p", "-r", "-w", "--"]
    groups = record.group_paths
    if cgroups.is_v2():
        groups = [group / "init" for group in groups]
    return _join(groups, [*enter, *argv])


def _join(groups: list[Path], argv: Sequence[str]) -> list[str]:
    """A shell that moves itself into the groups and becomes `argv`."""
    moves = "; ".join(f"echo $$ > '{group}/cgroup.procs'" for group in groups)
    return ["sh", "-ec", f'{moves}; exec "$@"', "sh", *argv]


def stop(layout: settings.Layout) -> list[str]:
    """Remove the node: its processes, cgroups and the host's interface. Returns what could not be removed."""
    record = load(layout)
    leftovers: list[str] = []
    if record:
        for pid, started in ((record.pid, record.pid_started), (record.launcher, record.launcher_started)):
            if pid and not identity.kill(pid, started):
                leftovers.append(f"process {pid}")
        groups = record.group_paths
    else:
        own = Path("/proc/self/cgroup").read_text()
        groups = cgroups.node_groups(layout.name, own, v2=cgroups.is_v2())
    # A half-finished start may have left processes that no namespace's end takes along.
    cgroups.kill_members(groups)
    network.disconnect_host(record.interface if record else layout.host_interface)
    leftovers += [f"cgroup {group}" for group in cgroups.remove(groups)]
    return leftovers


def delete_state(layout: settings.Layout) -> None:
    """Delete the state directory. The node must be stopped: kubelet's mounts lived in its mount namespace."""
    if layout.state.exists():
        shutil.rmtree(layout.state)
