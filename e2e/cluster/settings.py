"""Where things live, which versions run, and which addresses the node uses.

Everything that survives `down` (binaries, the container image store) is a cache under `~/.cache/moonpool`;
everything that belongs to one running cluster is under its state directory and goes away with it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).parent

KUBERNETES_VERSION = "1.36.3"
COREDNS_VERSION = "1.15.0"
KUBE_ROUTER_VERSION = "2.1.0"
PAUSE_IMAGE = "registry.local/pause:1"

API_PORT = 6443
NODE_IP = "10.99.0.1"
HOST_IP = "10.99.0.254"
NODE_NET_PREFIX = 24
POD_CIDR = "10.244.0.0/16"
NODE_POD_CIDR = "10.244.1.0/24"
SERVICE_CIDR = "10.96.0.0/16"
API_SERVICE_IP = "10.96.0.1"
DNS_SERVICE_IP = "10.96.0.10"
CLUSTER_DOMAIN = "cluster.local"

DEFAULT_NAME = "moonpool"


def cache_root() -> Path:
    """The cache shared by all clusters of this user; `MOONPOOL_CACHE` moves it."""
    return Path(os.environ.get("MOONPOOL_CACHE", Path.home() / ".cache" / "moonpool"))


def state_root() -> Path:
    """The parent of all state directories; `MOONPOOL_STATE` moves it. Must be on a disk, not on tmpfs."""
    return Path(os.environ.get("MOONPOOL_STATE", "/var/tmp/moonpool"))


@dataclass(frozen=True)
class Layout:
    """The paths of one named cluster."""

    name: str = DEFAULT_NAME

    @property
    def state(self) -> Path:
        return state_root() / self.name

    @property
    def logs(self) -> Path:
        return self.state / "log"

    @property
    def pki(self) -> Path:
        return self.state / "pki"

    @property
    def etc(self) -> Path:
        return self.state / "etc"

    @property
    def volumes(self) -> Path:
        """A folder seen under the same path on the host and on the node, for local PersistentVolumes."""
        return self.state / "volumes"

    @property
    def kubeconfig(self) -> Path:
        return self.etc / "admin.kubeconfig"

    @property
    def node_record(self) -> Path:
        """What `down` needs to remove the node, written before anything is created."""
        return self.state / "node.json"

    @property
    def containerd_root(self) -> Path:
        """The image store. A cache: it outlives `down`, and `down --purge` deletes it."""
        return cache_root() / "containerd" / self.name

    @property
    def host_interface(self) -> str:
        """The host's end of the veth pair (at most 15 characters)."""
        return f"mp-{self.name}"[:15]

    @property
    def kubernetes_bin(self) -> Path:
        return cache_root() / "bin" / f"kubernetes-v{KUBERNETES_VERSION}"

    @property
    def coredns_bin(self) -> Path:
        return cache_root() / "bin" / f"coredns-v{COREDNS_VERSION}"

    @property
    def kube_router_bin(self) -> Path:
        return cache_root() / "bin" / f"kube-router-v{KUBE_ROUTER_VERSION}"
