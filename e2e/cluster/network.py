"""The host's way into the node's network: one veth pair and two routes.

With it `https://10.99.0.1:6443`, pods (10.244.0.0/16) and Services (10.96.0.0/16) are reachable from the host.
Nothing on the host is masqueraded or forwarded, so the node gets no way out through it.
"""

from __future__ import annotations

import subprocess

from e2e.cluster import settings
from e2e.cluster.errors import CannotHostError, ClusterError


def connect_host(interface: str, node_pid: int) -> None:
    """Put one end of a veth pair on the host and the other into the node's bridge."""
    disconnect_host(interface)
    _run("ip", "link", "add", interface, "type", "veth", "peer", "name", "host0", "netns", str(node_pid))
    inside = ("nsenter", "-t", str(node_pid), "-n", "--")
    _run(*inside, "ip", "link", "set", "host0", "master", "br-mgmt", "up")
    _run("ip", "addr", "add", f"{settings.HOST_IP}/{settings.NODE_NET_PREFIX}", "dev", interface)
    _run("ip", "link", "set", interface, "up")
    for cidr in (settings.POD_CIDR, settings.SERVICE_CIDR):
        _run("ip", "route", "add", cidr, "via", settings.NODE_IP, "dev", interface)


def disconnect_host(interface: str) -> None:
    """Remove the host's end; its routes go with it. No error when there is none."""
    subprocess.run(["ip", "link", "del", interface], capture_output=True)


def is_connected(interface: str) -> bool:
    return subprocess.run(["ip", "link", "show", interface], capture_output=True).returncode == 0


def foreign_routes(routes: str, interface: str) -> list[str]:
    """Lines of `ip route` that claim one of the node's networks for another interface."""
    ours = (settings.POD_CIDR, settings.SERVICE_CIDR, "10.99.0.0/24")
    return [
        line for line in routes.splitlines() if line.split(" ", 1)[0] in ours and f" dev {interface} " not in line + " "
    ]


def refuse_taken_routes(interface: str) -> None:
    """Raise CannotHostError when the node's addresses are somebody else's on this host."""
    routes = subprocess.run(["ip", "route"], capture_output=True, text=True).stdout
    if taken := foreign_routes(routes, interface):
        raise CannotHostError(
            f"the cluster's network is already routed elsewhere ({taken[0].strip()}): "
            "stop the other cluster, or remove that route."
        )


def _run(*argv: str) -> None:
    done = subprocess.run(argv, capture_output=True, text=True)
    if done.returncode:
        raise ClusterError(f"`{' '.join(argv)}` failed: {done.stderr.strip()}")
