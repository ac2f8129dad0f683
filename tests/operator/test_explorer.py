"""Many schedules: edits in mid-roll, the operator killed after any write, the store down; then everything settles."""

from __future__ import annotations

import contextlib
import os

import pytest
from moonpool_operator.clients.kube import ApiError
from moonpool_operator.reconcile.context import Context
from moonpool_operator.reconcile.service import reconcile_service
from moonpool_operator.reconcile.store import reconcile_store
from moonpool_operator.settings import Settings

from tests.operator.memory_cluster import NS, Died, MemoryCluster

#: MOONPOOL_EXPLORE=1000 looks at more schedules than a test run has time for.
SEEDS = range(int(os.environ.get("MOONPOOL_EXPLORE", "8")))
LIMITS = [(2, 1, 0), (3, 0, 1), (3, 2, 1), (1, 1, 0)]


def context(cluster: MemoryCluster) -> Context:
    return Context(
        kube=cluster.kube,  # type: ignore[arg-type]
        workers=cluster,  # type: ignore[arg-type]
        gateways=cluster,  # type: ignore[arg-type]
        admin_of=lambda _: cluster.master,  # type: ignore[arg-type,return-value]
        settings=Settings(),
        clock=lambda: cluster.now,
    )


async def reconcile(cluster: MemoryCluster, what: str, dies: bool) -> None:
    cluster.fuse.left = cluster.random.randint(1, 6) if dies else None
    with contextlib.suppress(Died, ApiError):
        if what == "service":
            await reconcile_service(context(cluster), NS, "chat")
        else:
            await reconcile_store(context(cluster), NS, "kv")
    cluster.fuse.left = None


def edit(cluster: MemoryCluster, version: str) -> None:
    service = cluster.service
    service["spec"]["weightVersion"] = version
    service["metadata"]["generation"] += 1
    cluster.kube._put(service["kind"], service)


def conditions(cluster: MemoryCluster) -> dict[str, str]:
    return {c["type"]: c["status"] for c in cluster.service.get("status", {}).get("conditions", [])}


async def settle(cluster: MemoryCluster, rounds: int = 120) -> None:
    """Everything gets its turn, again and again, without deaths."""
    for _ in range(rounds):
        for step in cluster.events():
            step()
            cluster.check()
        for what in ("service", "store", "service"):
            await reconcile(cluster, what, dies=False)
            cluster.check()
        found = conditions(cluster)
        if found.get("Ready") == "True" and cluster.service["status"]["rollout"]["step"] == "Complete":
            return
    raise AssertionError(f"did not settle: {cluster.service['status']}\n{cluster.master.tenants_}")


@pytest.mark.parametrize("limits", LIMITS, ids=str)
async def test_every_schedule_keeps_the_promises_and_ends(limits: tuple[int, int, int]) -> None:
    for seed in SEEDS:
        cluster = MemoryCluster(seed, *limits)
        try:
            await _explore(cluster)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, limits {limits}: {error}") from error


async def _explore(cluster: MemoryCluster) -> None:
    await settle(cluster)
    edits = list(cluster.random.choice(["BAC", "BA", "BCB", "B", "BABAB"]))
    last = edits[-1]
    for _ in range(150):
        roll = cluster.random.random()
        if edits and roll < 0.05:
            edit(cluster, edits.pop(0))
        elif roll < 0.07:
            cluster.master.up = not cluster.master.up
        elif roll < 0.35:
            await reconcile(cluster, "service", dies=cluster.random.random() < 0.5)
        elif roll < 0.5:
            await reconcile(cluster, "store", dies=cluster.random.random() < 0.5)
        else:
            cluster.random.choice(cluster.events())()
        cluster.check()
    cluster.master.up = True
    edit(cluster, last)
    await settle(cluster)
    _check_end(cluster, last)


def _check_end(cluster: MemoryCluster, last: str) -> None:
    status = cluster.service["status"]
    assert {name: state for name, state in conditions(cluster).items() if state != "True"} == {}
    versions = {pod["metadata"]["labels"]["moonpool.dev/revision"] for pod in cluster.pods()}
    assert len(versions) == 1 and len(cluster.pods()) == cluster.desired
    active = [claim for claim in status["kvNamespaces"] if claim["state"] == "Active"]
    assert len(active) == 1 and active[0]["weightVersion"] == last
    assert list(cluster.master.tenants_) == [active[0]["tenant"]], "only the live tenant is left in the store"
    assert len(set(cluster.deleted_tenants)) == len(cluster.deleted_tenants), "a fenced tenant was used again"
    assert active[0]["tenant"] not in cluster.deleted_tenants
    sets = [1 for kind, _ in cluster.kube.objects if kind == "ReplicaSet"]
    assert len(sets) == 1, "old ReplicaSets are collected"


async def test_an_idle_cluster_makes_no_write() -> None:
    cluster = MemoryCluster(0, 2, 1, 0)
    await settle(cluster)
    await settle(cluster)
    before = cluster.kube.version
    for _ in range(3):
        await reconcile(cluster, "service", dies=False)
        await reconcile(cluster, "store", dies=False)
    assert cluster.kube.version == before
