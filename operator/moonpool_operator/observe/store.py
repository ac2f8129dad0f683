"""Everything about one KVStore, read now: its pods, what its master says, who claims and who was granted a tenant."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import UTC, datetime

from moonpool_api import names
from moonpool_api.kv_store import KVStoreSpec, KVStoreStatus
from moonpool_api.quantity import parse_bytes

from moonpool_operator.clients.kube import KubeClient, Object
from moonpool_operator.clients.mooncake import MasterUnavailable, MooncakeAdmin
from moonpool_operator.observe.model import Claim, Grant, Pod, StoreObservation
from moonpool_operator.observe.pods import parse_pod
from moonpool_operator.observe.service import InvalidSpec, parse_service, terminating

_CHILD_KINDS = ("Service", "Deployment", "StatefulSet")


async def observe_store(
    kube: KubeClient,
    admin_of: Callable[[Pod], MooncakeAdmin],
    namespace: str,
    name: str,
    lost_pod_deadline: float,
) -> StoreObservation | None:
    """None when there is no such KVStore."""
    live = await kube.get(names.KV_STORE, namespace, name)
    if live is None:
        return None
    metadata = live["metadata"]
    try:
        spec = KVStoreSpec.model_validate(live["spec"])
        status = KVStoreStatus.model_validate(live.get("status") or {})
    except ValueError as error:
        raise InvalidSpec(str(error)) from error
    labels = {names.LABEL_STORE: name}
    lists = await asyncio.gather(*(kube.list(kind, namespace, labels) for kind in ("Pod", *_CHILD_KINDS)))
    services, claims, grants = await observe_demand(kube, namespace, name, lost_pod_deadline)
    pods = [parse_pod(pod) for pod in lists[0]]
    masters = tuple(pod for pod in pods if pod.role == names.ROLE_MASTER)
    seen = StoreObservation(
        namespace=namespace,
        name=name,
        uid=metadata["uid"],
        generation=metadata.get("generation", 0),
        spec=spec,
        status=status,
        resource_version=metadata["resourceVersion"],
        live_status=live.get("status") or {},
        deleting=bool(metadata.get("deletionTimestamp")),
        finalizers=tuple(metadata.get("finalizers") or ()),
        namespace_terminating=await terminating(kube, namespace),
        master_pods=masters,
        store_pods=tuple(pod for pod in pods if pod.role == names.ROLE_STORE),
        services=services,
        claims=claims,
        grants=grants,
        children={
            (kind, item["metadata"]["name"]): item
            for kind, items in zip(_CHILD_KINDS, lists[1:], strict=True)
            for item in items
        },
    )
    return await with_master(seen, admin_of)


def running_master(pods: Iterable[Pod]) -> Pod | None:
    candidates = [pod for pod in pods if pod.ip and pod.phase == "Running" and not pod.terminating]
    return max(candidates, key=lambda pod: (pod.ready, str(pod.created)), default=None)


async def with_master(seen: StoreObservation, admin_of: Callable[[Pod], MooncakeAdmin]) -> StoreObservation:
    """``seen`` with the master's present figures, or with why there are none."""
    master = running_master(seen.master_pods)
    if master is None:
        return replace(seen, figures=None, tenants=None, master_error="no master pod is running")
    admin = admin_of(master)
    try:
        return replace(seen, figures=await admin.figures(), tenants=await admin.tenants(), master_error="")
    except MasterUnavailable as error:
        return replace(seen, figures=None, tenants=None, master_error=str(error))


async def observe_demand(
    kube: KubeClient, namespace: str, store: str, lost_pod_deadline: float
) -> tuple[tuple[str, ...], tuple[Claim, ...], tuple[Grant, ...]]:
    """(services that refer to the store, their claims, pods that were granted a tenant), all uncached."""
    live_services, live_pods = await asyncio.gather(
        kube.list(names.INFERENCE_SERVICE, namespace),
        kube.list("Pod", namespace, {names.LABEL_ROLE: names.ROLE_WORKER}),
    )
    referring, claims = [], []
    for live in live_services:
        refers, theirs = _demand_of(live, store)
        if refers:
            referring.append(live["metadata"]["name"])
        claims += theirs
    now = datetime.now(UTC)
    pods = [parse_pod(pod) for pod in live_pods]
    grants = [
        Grant(pod.name, tenant)
        for pod in pods
        if (tenant := pod.annotations.get(names.ANNOTATION_GRANTED_TENANT))
        and not pod.finished
        and not pod.lost(now, lost_pod_deadline)
    ]
    return tuple(sorted(referring)), tuple(claims), tuple(grants)


def _demand_of(live: Object, store: str) -> tuple[bool, list[Claim]]:
    name = live["metadata"]["name"]
    try:
        spec, status = parse_service(live)
    except InvalidSpec:
        # Unreadable, so take it that it needs all it ever had: an unflushed tenant is the smaller harm.
        claims = live.get("status", {}).get("kvNamespaces", [])
        return True, [Claim(name, c["hash"]) for c in claims if c.get("store") == store and c.get("hash")]
    l3 = spec.cache.l3
    quota = parse_bytes(l3.tenant_quota) if l3 and l3.tenant_quota else None
    claims_here = [claim for claim in status.kv_namespaces if claim.store == store]
    wanted = [
        Claim(name, claim.hash, quota if claim.state == "Active" else None, claim.state == "Draining")
        for claim in claims_here
        if claim.state in ("Active", "Draining")
    ]
    return bool(wanted) or bool(l3 and l3.kv_store_ref.name == store), wanted
