"""One thing at a time on the cluster in memory: what a person would try, and what the status says then."""

from __future__ import annotations

from datetime import timedelta

from moonpool_api import names
from moonpool_api.names import ANNOTATION_GRANTED_TENANT, READINESS_GATE
from moonpool_operator.reconcile.service import reconcile_service

from tests.operator.memory_cluster import NS, MemoryCluster, set_condition
from tests.operator.test_explorer import conditions, context, edit, reconcile, settle


def spec(cluster: MemoryCluster, **changes: object) -> None:
    service = cluster.service
    for path, value in changes.items():
        node = service["spec"]
        *parents, leaf = path.split("__")
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = value
    service["metadata"]["generation"] += 1
    cluster.kube._put(service["kind"], service)


async def turn(cluster: MemoryCluster, rounds: int = 10) -> None:
    for _ in range(rounds):
        for step in cluster.events():
            step()
        for what in ("service", "store"):
            await reconcile(cluster, what, dies=False)


def reason(cluster: MemoryCluster, kind: str) -> tuple[str, str]:
    found = next(c for c in cluster.service["status"]["conditions"] if c["type"] == kind)
    return found["reason"], found["message"]


def revisions(cluster: MemoryCluster) -> set[str]:
    return {pod["metadata"]["labels"][names.LABEL_REVISION] for pod in cluster.pods()}


def sizes(cluster: MemoryCluster) -> dict[str, int]:
    sets = [obj for (kind, _), obj in cluster.kube.objects.items() if kind == "ReplicaSet"]
    return {obj["metadata"]["name"]: obj["spec"]["replicas"] for obj in sets}


async def deployed(seed: int = 0, limits: tuple[int, int, int] = (2, 1, 0)) -> MemoryCluster:
    cluster = MemoryCluster(seed, *limits)
    await settle(cluster)
    return cluster


async def test_an_edit_that_does_not_fit_is_refused_with_the_sum_and_the_old_workers_serve_on() -> None:
    cluster = await deployed()
    before = revisions(cluster)
    spec(cluster, resources={"limits": {"memory": "1Gi"}})
    await turn(cluster)
    assert revisions(cluster) == before and len(cluster.serving()) == 2
    why, message = reason(cluster, "RolloutComplete")
    assert why == "DoesNotFit" and "= 2.0 GiB" in message
    assert conditions(cluster)["Ready"] == "False" and conditions(cluster)["WorkersReady"] == "True"


async def test_a_paused_service_starts_no_rollout_but_scales() -> None:
    cluster = await deployed()
    before = revisions(cluster)
    spec(cluster, paused=True, weightVersion="B", replicas=3)
    cluster.desired = 3
    await turn(cluster)
    assert revisions(cluster) == before and len(cluster.pods()) == 3
    assert reason(cluster, "RolloutComplete")[0] == "Paused"
    spec(cluster, paused=False)
    await settle(cluster)
    assert revisions(cluster) != before


async def test_a_pause_in_mid_roll_holds_it() -> None:
    cluster = await deployed(limits=(3, 1, 0))
    edit(cluster, "B")
    await turn(cluster, 3)
    spec(cluster, paused=True)
    await turn(cluster, 2)
    held = sizes(cluster)
    await turn(cluster, 20)
    now = sizes(cluster)
    assert held == now and len(now) == 2
    assert cluster.service["status"]["rollout"]["step"] == "Paused"
    spec(cluster, paused=False)
    await settle(cluster)


async def test_a_change_of_replicas_makes_no_revision() -> None:
    cluster = await deployed()
    before = revisions(cluster)
    for replicas in (4, 1, 0, 2):
        spec(cluster, replicas=replicas)
        cluster.desired, cluster.deployed = replicas, False
        await turn(cluster)
        assert len(cluster.pods()) == replicas and revisions(cluster) <= before
    assert cluster.service["status"]["selector"] == "moonpool.dev/service=chat,moonpool.dev/role=worker"


async def test_keep_never_flushes_and_says_so() -> None:
    cluster = await deployed()
    spec(cluster, rollout__flush="Keep", weightVersion="B")
    await settle(cluster)
    assert conditions(cluster)["L3Flushed"] == "Unknown" and reason(cluster, "L3Flushed")[0] == "Kept"
    assert len(cluster.master.tenants_) == 2


async def test_an_edit_that_does_not_touch_kv_keeps_the_tenant() -> None:
    cluster = await deployed()
    before, tenants = revisions(cluster), list(cluster.master.tenants_)
    spec(cluster, engine={"maxRunning": 3})
    await settle(cluster)
    assert revisions(cluster) != before and list(cluster.master.tenants_) == tenants
    assert cluster.deleted_tenants == []


async def test_turning_l3_off_flushes_what_it_held() -> None:
    cluster = await deployed()
    spec(cluster, cache={})
    await settle(cluster)
    assert cluster.master.tenants_ == {} and len(cluster.deleted_tenants) == 1
    assert reason(cluster, "CacheReady")[0] == "L3Disabled"


async def test_a_missing_store_is_named_and_workers_serve_without_l3() -> None:
    cluster = MemoryCluster(0, 2, 1, 0)
    spec(cluster, cache__l3={"kvStoreRef": {"name": "nowhere"}})
    await turn(cluster)
    assert len(cluster.serving()) == 2 and conditions(cluster)["RolloutComplete"] == "True"
    assert reason(cluster, "CacheReady")[0] == "KVStoreNotFound" and "nowhere" in reason(cluster, "CacheReady")[1]


async def test_the_gate_never_depends_on_the_store() -> None:
    cluster = MemoryCluster(0, 2, 1, 0)
    cluster.master.up = False
    await turn(cluster)
    assert all(cluster.condition(pod, READINESS_GATE) for pod in cluster.pods()) and len(cluster.serving()) == 2
    assert not any(pod["metadata"]["annotations"].get(ANNOTATION_GRANTED_TENANT) for pod in cluster.pods())
    assert reason(cluster, "CacheReady")[0] == "StoreNotReady"


async def test_a_stuck_rollout_exceeds_its_deadline() -> None:
    cluster = await deployed()
    spec(cluster, rollout__progressDeadline="30s", weightVersion="B")
    for _ in range(20):
        cluster.replica_sets()
        cluster.pass_time()
        for pod in cluster.pods():
            if pod["status"].get("loaded"):
                set_condition(pod, {"type": "Ready", "status": "True"})
        await reconcile(cluster, "service", dies=False)
    assert reason(cluster, "RolloutComplete")[0] == "ProgressDeadlineExceeded"
    assert len(cluster.serving()) == 2, "the old ones serve on"


async def test_a_service_that_is_deleted_leaves_no_tenant() -> None:
    cluster = await deployed()
    del cluster.kube.objects[(names.INFERENCE_SERVICE, "chat")]
    await reconcile(cluster, "store", dies=False)
    assert len(cluster.master.tenants_) == 1, "its pods still exist"
    for pod in cluster.pods():
        del cluster.kube.objects[("Pod", pod["metadata"]["name"])]
    await reconcile(cluster, "store", dies=False)
    assert cluster.master.tenants_ == {}


async def test_a_bake_that_ends_while_paused_is_not_polled() -> None:
    cluster = await deployed()
    spec(cluster, weightVersion="B", rollout__bake="1h")
    await turn(cluster, rounds=40)
    assert reason(cluster, "L3Flushed")[0] == "Baking"
    spec(cluster, paused=True)
    cluster.now += timedelta(hours=2)
    await turn(cluster)
    assert await reconcile_service(context(cluster), NS, "chat") is None
    assert cluster.deleted_tenants == []
    spec(cluster, paused=False)
    await turn(cluster)
    assert len(cluster.deleted_tenants) == 1


async def test_finalizers_of_others_stay() -> None:
    cluster = await deployed()
    store = cluster.kube.objects[(names.KV_STORE, "kv")]
    store["metadata"]["finalizers"] = ["foregroundDeletion"]
    await reconcile(cluster, "store", dies=False)
    assert store["metadata"]["finalizers"] == ["foregroundDeletion", names.FINALIZER]
    store["metadata"]["deletionTimestamp"] = "2026-12-01T00:00:00Z"
    del cluster.kube.objects[(names.INFERENCE_SERVICE, "chat")]
    await reconcile(cluster, "store", dies=False)
    assert store["metadata"]["finalizers"] == ["foregroundDeletion"]


async def test_a_revision_that_the_api_server_refuses_is_told_and_the_old_workers_are_cared_for() -> None:
    cluster = await deployed()
    before = revisions(cluster)
    cluster.kube.refuses = "spec.template.spec.nodeSelector: Invalid value"
    spec(cluster, scheduling={"nodeSelector": {"a b": "c"}})
    await turn(cluster)
    assert reason(cluster, "RolloutComplete") == ("Refused", cluster.kube.refuses)
    cluster.terminate(cluster.pods()[0])
    await turn(cluster, rounds=30)
    assert revisions(cluster) == before and len(cluster.serving()) == 2
    cluster.kube.refuses = ""
    await settle(cluster)
    assert revisions(cluster) != before


async def test_a_revision_that_was_announced_and_never_made_takes_no_worker_away() -> None:
    cluster = await deployed()
    before = revisions(cluster)
    cluster.service["status"]["rollout"]["toRevision"] = "0123456789"
    cluster.kube.refuses = "invalid"
    spec(cluster, engine={"maxRunning": 3})
    cluster.terminate(cluster.pods()[0])
    await turn(cluster, rounds=30)
    assert revisions(cluster) == before and len(cluster.serving()) == 2
