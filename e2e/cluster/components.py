"""The processes of the node: their command lines, how they are started, and how a dead one is noticed."""

from __future__ import annotations

import subprocess
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from e2e.cluster import identity, settings
from e2e.cluster.errors import ClusterError, ComponentDiedError
from e2e.cluster.node import NodeRecord, exec_argv

LOG_LINES = 12


@dataclass(frozen=True)
class Component:
    """One process of the node, with the environment it wants on top of ours."""

    name: str
    argv: tuple[str, ...]
    env: tuple[str, ...] = ()


def containerd(layout: settings.Layout, config: str = "containerd.toml") -> Component:
    return Component("containerd", ("containerd", "-c", f"{layout.etc}/{config}"))


def etcd(layout: settings.Layout) -> Component:
    url, peer = "http://127.0.0.1:2379", "http://127.0.0.1:2380"
    flags = (
        f"--data-dir={layout.state}/etcd",
        f"--listen-client-urls={url}",
        f"--advertise-client-urls={url}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=default={peer}",
        # The data is thrown away with the cluster, so nothing is lost by not waiting for the disk.
        "--unsafe-no-fsync",
        "--log-level=warn",
    )
    return Component("etcd", (f"{layout.kubernetes_bin}/etcd", *flags))


def apiserver(layout: settings.Layout) -> Component:
    pki, etc = layout.pki, layout.etc
    flags = (
        "--etcd-servers=http://127.0.0.1:2379",
        f"--secure-port={settings.API_PORT}",
        "--bind-address=0.0.0.0",
        f"--advertise-address={settings.NODE_IP}",
        f"--client-ca-file={pki}/ca.crt",
        f"--tls-cert-file={pki}/apiserver.crt",
        f"--tls-private-key-file={pki}/apiserver.key",
        f"--token-auth-file={etc}/tokens.csv",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        f"--service-cluster-ip-range={settings.SERVICE_CIDR}",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-signing-key-file={pki}/sa.key",
        f"--service-account-key-file={pki}/sa.pub",
        f"--kubelet-client-certificate={pki}/kubelet-client.crt",
        f"--kubelet-client-key={pki}/kubelet-client.key",
        "--kubelet-preferred-address-types=InternalIP",
        # One CA for clients and the front proxy is allowed only when the proxy's names are listed.
        f"--requestheader-client-ca-file={pki}/ca.crt",
        "--requestheader-allowed-names=front-proxy",
        "--requestheader-username-headers=X-Remote-User",
        "--requestheader-group-headers=X-Remote-Group",
        "--requestheader-extra-headers-prefix=X-Remote-Extra-",
        f"--proxy-client-cert-file={pki}/proxy-client.crt",
        f"--proxy-client-key-file={pki}/proxy-client.key",
        "--enable-aggregator-routing",
        "--allow-privileged=true",
        "--profiling=false",
    )
    return Component("kube-apiserver", (f"{layout.kubernetes_bin}/kube-apiserver", *flags))


def controllers(layout: settings.Layout) -> tuple[Component, ...]:
    """What runs once the API server answers: controllers, scheduler, kubelet, proxy, DNS."""
    pki, etc, folder = layout.pki, layout.etc, layout.kubernetes_bin
    manager = (
        f"--kubeconfig={etc}/controller-manager.kubeconfig",
        "--use-service-account-credentials",
        f"--service-account-private-key-file={pki}/sa.key",
        f"--root-ca-file={pki}/ca.crt",
        f"--cluster-signing-cert-file={pki}/ca.crt",
        f"--cluster-signing-key-file={pki}/ca.key",
        "--leader-elect=false",
        "--node-monitor-grace-period=16s",
        "--kube-api-qps=100",
        "--kube-api-burst=200",
    )
    proxy = (
        f"--kubeconfig={etc}/proxy.kubeconfig",
        f"--hostname-override={layout.name}",
        "--proxy-mode=iptables",
        f"--cluster-cidr={settings.POD_CIDR}",
        # Zero leaves the machine's conntrack settings alone.
        "--conntrack-max-per-core=0",
        "--conntrack-tcp-timeout-established=0",
        "--conntrack-tcp-timeout-close-wait=0",
    )
    scheduler = (f"--kubeconfig={etc}/scheduler.kubeconfig", "--leader-elect=false")
    return (
        Component("kube-controller-manager", (f"{folder}/kube-controller-manager", *manager)),
        Component("kube-scheduler", (f"{folder}/kube-scheduler", *scheduler)),
        kubelet(layout),
        Component("kube-proxy", (f"{folder}/kube-proxy", *proxy)),
        Component("coredns", (f"{layout.coredns_bin}/coredns", "-conf", f"{etc}/Corefile")),
    )


def kubelet(layout: settings.Layout) -> Component:
    flags = (
        f"--config={layout.etc}/kubelet.yaml",
        f"--kubeconfig={layout.etc}/node.kubeconfig",
        f"--hostname-override={layout.name}",
        f"--node-ip={settings.NODE_IP}",
        f"--root-dir={layout.state}/kubelet",
        "--v=1",
    )
    # Without this, the built-in credential provider asks a cloud's metadata server and waits for it.
    return Component("kubelet", (f"{layout.kubernetes_bin}/kubelet", *flags), ("AWS_EC2_METADATA_DISABLED=true",))


def kube_router(layout: settings.Layout) -> Component:
    """NetworkPolicy enforcement, which the bridge plugin lacks. A test tool: never part of what users install."""
    flags = (
        f"--kubeconfig={layout.etc}/netpol.kubeconfig",
        f"--hostname-override={layout.name}",
        "--run-firewall=true",
        "--run-router=false",
        "--run-service-proxy=false",
        f"--service-cluster-ip-range={settings.SERVICE_CIDR}",
        "--iptables-sync-period=10s",
    )
    return Component("kube-router", (f"{layout.kube_router_bin}/kube-router", *flags))


def start(layout: settings.Layout, record: NodeRecord, component: Component) -> None:
    """Start a component on the node, detached, with its log in the state directory."""
    log = layout.logs / f"{component.name}.log"
    script = 'log=$1; shift; setsid "$@" >>"$log" 2>&1 </dev/null & echo $!'
    command = ["sh", "-c", script, "sh", str(log), "env", *component.env, *component.argv]
    done = subprocess.run(exec_argv(record, command), capture_output=True, text=True)
    if done.returncode:
        raise ClusterError(f"{component.name} could not be started on the node: {done.stderr.strip()}")
    record.components[component.name] = int(done.stdout)
    record.save(layout)


def stop(layout: settings.Layout, record: NodeRecord, name: str) -> None:
    """Stop a component and wait for its end."""
    pid = record.components.pop(name)
    script = "kill $1; for i in $(seq 100); do kill -0 $1 2>/dev/null || exit 0; sleep 0.05; done; kill -9 $1"
    subprocess.run(exec_argv(record, ["sh", "-c", script, "sh", str(pid)]), capture_output=True)
    record.save(layout)


def node_proc(record: NodeRecord) -> Path:
    """The node's /proc, seen from the host: its pids are the node's own."""
    return Path(f"/proc/{record.pid}/root/proc")


def is_running(record: NodeRecord, name: str) -> bool:
    pid = record.components.get(name, 0)
    return record.alive and pid > 0 and identity.start_time(pid, node_proc(record)) is not None


def check(layout: settings.Layout, record: NodeRecord) -> None:
    """Raise ComponentDiedError for the first component that has ended."""
    if not record.alive:
        raise ComponentDiedError(f"the node's process 1 ended; {last_lines(layout, 'init')}")
    for name in record.components:
        if not is_running(record, name):
            raise ComponentDiedError(f"{name} ended; {last_lines(layout, name)}")


def last_lines(layout: settings.Layout, name: str, lines: int = LOG_LINES) -> str:
    """The path of a component's log and its last lines."""
    log = layout.logs / f"{name}.log"
    try:
        with log.open(errors="replace") as handle:
            tail = "".join(deque(handle, lines))
    except OSError:
        tail = "(no log)"
    return f"the end of {log}:\n{tail.rstrip()}"
