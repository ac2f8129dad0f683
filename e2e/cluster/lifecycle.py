"""Starts and stops the embedded cluster."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from e2e.cluster import api, components, config, golang, host, image_store, node, settings
from e2e.cluster.cluster import Cluster, embedded, external
from e2e.cluster.errors import ClusterError, ComponentDiedError
from e2e.cluster.progress import Progress, Stage

API_SECONDS = 60.0
NODE_SECONDS = 60.0
# A kubelet that starts over odd containerd state registers and then stays NotReady; a restart cures it.
KUBELET_RESTART_SECONDS = 15.0
PATIENCE_SECONDS = 20.0


def up(name: str = settings.DEFAULT_NAME, *, network_policy: bool = False, progress: Progress | None = None) -> Cluster:
    """Make sure that a cluster runs and return it, with NetworkPolicies enforced if `network_policy`.

    `KUBECONFIG` set to a usable cluster: that one, and nothing is built or started. Otherwise the embedded cluster of
    that name, which is started unless it is healthy already. Raises ClusterError.
    """
    progress = progress or Progress()
    layout = settings.Layout(name)
    if given := given_kubeconfig(layout):
        kubectl = shutil.which("kubectl") or str(layout.kubernetes_bin / "kubectl")
        if api.usable(kubectl, given):
            progress.say(f"using the cluster of KUBECONFIG={given}; nothing is built or started")
            return external(layout, Path(given), Path(kubectl))
        progress.say(f"KUBECONFIG={given} is set, but no cluster answers there: using the embedded one")
    host.check_can_host()
    with _lock(layout):
        wrong = _lasting_ailment(layout)
        if wrong is None:
            progress.say("the embedded cluster is up already")
        else:
            prepare(layout, progress)
            if layout.state.exists():
                progress.say(f"removing the cluster that was here: {wrong}")
                _remove(layout)
            started = time.monotonic()
            _start(layout, progress)
            progress.say(f"node ready in {time.monotonic() - started:.1f} s")
        if network_policy:
            enforce_network_policies(layout, progress)
    return embedded(layout)


def given_kubeconfig(layout: settings.Layout) -> str | None:
    """`KUBECONFIG` if it names a file that isn't the embedded cluster's own."""
    given = os.environ.get("KUBECONFIG", "")
    if not given or Path(given).resolve() == layout.kubeconfig.resolve() or not Path(given).exists():
        return None
    return given


def ailment(layout: settings.Layout) -> str | None:
    """What is wrong with the cluster, None when it's healthy: every component runs and the node is Ready."""
    record = node.load(layout)
    if not record or not record.alive:
        return "the node is down"
    try:
        components.check(layout, record)
    except ComponentDiedError as error:
        return str(error)
    if "coredns" not in record.components:
        return "it was started only half"
    server = api.Api(layout.kubeconfig)
    return server.node_ready(layout.name) if server.is_ready() else "the API server does not answer"


def _lasting_ailment(layout: settings.Layout) -> str | None:
    """What is wrong and doesn't pass: a busy machine is slow to answer, and no reason to throw a cluster away."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while (wrong := ailment(layout)) and _all_run(layout) and time.monotonic() < deadline:
        time.sleep(0.5)
    return wrong


def _all_run(layout: settings.Layout) -> bool:
    record = node.load(layout)
    if record is None or "coredns" not in record.components:
        return False
    return all(components.is_running(record, name) for name in record.components)


def prepare(layout: settings.Layout, progress: Progress) -> None:
    """Everything that is done once per machine: packages and binaries."""
    host.ensure_packages(progress)
    host.load_modules()
    programs = (golang.kubernetes(layout), golang.coredns(layout))
    if not all(golang.is_complete(program) for program in programs):
        go = host.ensure_go(progress)
        for program in programs:
            golang.ensure_built(program, go, progress)


def down(name: str = settings.DEFAULT_NAME, *, purge: bool = False, progress: Progress | None = None) -> None:
    """Remove the cluster: processes, mounts, cgroups, namespaces, interface, state. Images stay unless `purge`."""
    progress = progress or Progress()
    layout = settings.Layout(name)
    host.check_root()
    with _lock(layout), progress.stage("removing the cluster"):
        _remove(layout)
        if purge:
            image_store.purge(layout)


def enforce_network_policies(layout: settings.Layout, progress: Progress) -> None:
    """Start kube-router's firewall on a running cluster. It enforces within about 15 s."""
    record = node.load(layout)
    if not record or components.is_running(record, "kube-router"):
        return
    program = golang.kube_router(layout)
    host.ensure_packages(progress, host.NETWORK_POLICY)
    if not golang.is_complete(program):
        golang.ensure_built(program, host.ensure_go(progress), progress)
    api.apply(layout.kubernetes_bin / "kubectl", layout.kubeconfig, settings.PACKAGE / "netpol.yaml")
    components.start(layout, record, components.kube_router(layout))


def _remove(layout: settings.Layout) -> None:
    if leftovers := node.stop(layout):
        raise ClusterError(f"could not be removed: {', '.join(leftovers)}; run `down` again")
    node.delete_state(layout)


def _start(layout: settings.Layout, progress: Progress) -> None:
    with progress.stage("making the node"):
        record = node.start(layout)
        config.write_all(layout)
        layout.containerd_root.mkdir(parents=True, exist_ok=True)
    with progress.stage("starting etcd, API server and containerd") as stage:
        components.start(layout, record, components.etcd(layout))
        components.start(layout, record, components.apiserver(layout))
        image_store.clean_leftovers(layout, record)
        components.start(layout, record, components.containerd(layout))
        image_store.await_ready(record)
        server = api.Api(layout.kubeconfig)
        for _ in _until(API_SECONDS, stage, "the API server", layout, record):
            if server.is_ready():
                break
    with progress.stage("starting controllers, kubelet, proxy and DNS") as stage:
        for component in components.controllers(layout):
            components.start(layout, record, component)
        api.apply(layout.kubernetes_bin / "kubectl", layout.kubeconfig, settings.PACKAGE / "dns.yaml")
        _await_node(layout, record, server, stage)
        for _ in _until(NODE_SECONDS, stage, "the default service account", layout, record):
            if server.exists("/api/v1/namespaces/default/serviceaccounts/default"):
                break


def _await_node(layout: settings.Layout, record: node.NodeRecord, server: api.Api, stage: Stage) -> None:
    """Wait for the node to be Ready; restart the kubelet once if it takes oddly long."""
    started = time.monotonic()
    restarted = False
    reason: str | None = None
    for _ in _until(NODE_SECONDS, stage, "the node", layout, record):
        reason = server.node_ready(layout.name)
        if reason is None:
            return
        stage.note(reason)
        if not restarted and time.monotonic() - started > KUBELET_RESTART_SECONDS:
            restarted = True
            stage.note("restarting the kubelet")
            components.stop(layout, record, "kubelet")
            components.start(layout, record, components.kubelet(layout))


def _until(
    seconds: float, stage: Stage, waiting_for: str, layout: settings.Layout, record: node.NodeRecord
) -> Iterator[None]:
    """Tick until the caller breaks off. Raises when a component dies or the time is over."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        yield
        components.check(layout, record)
        stage.note(f"waiting for {waiting_for}")
        time.sleep(0.1)
    blamed = "kube-apiserver" if "API" in waiting_for else "kubelet"
    raise ComponentDiedError(
        f"{waiting_for} was not ready after {seconds:.0f} s; {components.last_lines(layout, blamed)}"
    )


@contextmanager
def _lock(layout: settings.Layout) -> Iterator[None]:
    """One `up` or `down` of a cluster at a time."""
    settings.state_root().mkdir(parents=True, exist_ok=True)
    with (settings.state_root() / f".{layout.name}.lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
