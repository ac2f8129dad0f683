"""What the machine must offer, and what can be installed on it when missing."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path

from e2e.cluster import golang
from e2e.cluster.errors import CannotHostError, ClusterError
from e2e.cluster.progress import Progress

# What is looked for → the Debian package that brings it.
NEEDED = {
    "containerd": "containerd",
    "ctr": "containerd",
    "runc": "runc",
    "/usr/lib/cni/bridge": "containernetworking-plugins",
    "iptables": "iptables",
    "ip": "iproute2",
    "nsenter": "util-linux",
    "unshare": "util-linux",
    "mount": "mount",
    "conntrack": "conntrack",
    "ethtool": "ethtool",
    "socat": "socat",
    "openssl": "openssl",
}
SBIN = "/usr/local/sbin:/usr/sbin:/sbin"


def check_can_host() -> None:
    """Raise CannotHostError, one sentence, when this machine can't run the node."""
    if platform.system() != "Linux":
        raise CannotHostError("The embedded cluster needs Linux: set KUBECONFIG to a cluster of your own instead.")
    if os.geteuid() != 0:
        raise CannotHostError(
            "The embedded cluster needs root: run as root, or set KUBECONFIG to a cluster of your own."
        )
    for need in ("unshare", "nsenter"):
        if not shutil.which(need):
            raise CannotHostError(f"The embedded cluster needs `{need}`: install util-linux.")
    if not os.access("/sys/fs/cgroup", os.W_OK):
        raise CannotHostError("The cgroup tree is not writable here: run in a privileged container or on a machine.")
    probe = ["unshare", "--mount", "--cgroup", "--net", "--uts", "--ipc", "--pid", "--fork", "--mount-proc"]
    script = "mount -t sysfs sysfs /sys && mount -t tmpfs tmpfs /run"
    done = subprocess.run([*probe, "sh", "-c", script], capture_output=True, text=True)
    if done.returncode:
        raise CannotHostError(
            f"This machine lets root make no namespaces ({done.stderr.strip()}): "
            "run with CAP_SYS_ADMIN, or set KUBECONFIG to a cluster of your own."
        )


def missing_packages() -> list[str]:
    """Debian packages of which something needed is absent."""
    path = os.environ.get("PATH", "") + ":" + SBIN
    absent = {
        package
        for need, package in NEEDED.items()
        if not (os.access(need, os.X_OK) if need.startswith("/") else shutil.which(need, path=path))
    }
    return sorted(absent)


def ensure_packages(progress: Progress) -> None:
    """Install what is missing, by apt."""
    if missing := missing_packages():
        install(missing, progress)


def install(packages: list[str], progress: Progress) -> None:
    if not shutil.which("apt-get"):
        raise CannotHostError(f"Missing here: {', '.join(packages)}; install them, there is no apt-get to do it with.")
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    with progress.stage(f"installing {', '.join(packages)}") as stage:
        for step in (["update"], ["install", "-y", "--no-install-recommends", *packages]):
            stage.note(f"apt-get {step[0]}")
            done = subprocess.run(["apt-get", "-q", *step], capture_output=True, text=True, env=env)
            if done.returncode:
                raise ClusterError(f"apt-get {step[0]} failed:\n{(done.stdout + done.stderr)[-2000:]}")


def ensure_go(progress: Progress) -> Path:
    """A Go that can build the cluster, installed if there is none.

    Debian's own Go is older than the modules ask for. With GOTOOLCHAIN=auto, Go 1.21 and later fetch the toolchain
    they need through the module proxy; Debian 12's 1.19 can't, its backports can.
    """
    if go := golang.find_go():
        return go
    for package in ("golang-go", "golang-1.24-go", "golang-1.23-go", "golang-1.22-go", "golang-1.21-go"):
        known = subprocess.run(["apt-cache", "show", package], capture_output=True).returncode == 0
        if known:
            install([package], progress)
            if go := golang.find_go():
                return go
    raise CannotHostError("Go 1.21 or later is needed to build Kubernetes: install it and put it on PATH.")
