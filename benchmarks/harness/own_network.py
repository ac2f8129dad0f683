"""A network of this process's own, whose packets can be dropped without hurting anybody else."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from e2e.cluster import host
from e2e.cluster.errors import CannotHostError, ClusterError
from e2e.cluster.progress import Progress

_NEEDED = {"ip": "iproute2", "iptables": "iptables"}
_CLONE_NEWNET = 0x40000000
_LISTEN = "0A"


class NoNetwork(Exception):
    """Why there can be none, in words."""


def enter() -> None:
    """Move this process, and all that it starts from now on, into a new network with a loopback device.

    Before any thread is started. Installs the tools for it when they are missing; raises NoNetwork without the right
    to, or without them.
    """
    try:
        host.ensure_packages(Progress(), _NEEDED)
    except (CannotHostError, ClusterError) as failure:
        raise NoNetwork(str(failure)) from failure
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNET) != 0:
        raise NoNetwork(f"unshare: {os.strerror(ctypes.get_errno())}")
    _run("ip", "link", "set", "lo", "up")
    _run("iptables", "-L", "-n")


def listening_ports(pid: int) -> list[int]:
    """The TCP ports that a process listens on."""
    sockets = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(link)
        except OSError:
            continue
        if target.startswith("socket:["):
            sockets.add(target[8:-1])
    ports = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTEN and fields[9] in sockets:
                ports.add(int(fields[1].rpartition(":")[2], 16))
    return sorted(ports)


def drop(ports: Sequence[int]) -> None:
    """Packets to and from these ports vanish, also those of connections that are open."""
    for port in ports:
        for direction in ("--dport", "--sport"):
            _run("iptables", "-A", "INPUT", "-p", "tcp", direction, str(port), "-j", "DROP")


def restore() -> None:
    """Nothing is dropped any more."""
    _run("iptables", "-F", "INPUT")


def _run(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as failure:
        raise NoNetwork(str(failure)) from failure
    if done.returncode != 0:
        raise NoNetwork(f"{' '.join(command)}: {done.stderr.strip()}")
