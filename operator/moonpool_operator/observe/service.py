"""Everything about one InferenceService, read now."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from moonpool_api import names
from moonpool_api.inference_service import InferenceServiceSpec, InferenceServiceStatus
from moonpool_api.kv_store import KVStoreStatus

from moonpool_operator.clients.gateway import GatewayClient
from moonpool_operator.clients.kube import KubeClient, Object
from moonpool_operator.clients.worker import WorkerClient, WorkerReport
from moonpool_operator.observe.model import GatewayView, Pod, Revision, ServiceObservation, StoreView
from moonpool_operator.observe.pods import parse_pod, parse_replica_set

_CHILD_KINDS = ("ServiceAccount", "Role", "RoleBinding", "Service", "Deployment", "ReplicaSet")


class InvalidSpec(Exception):
    """The stored object does not parse: it was written under another version of the CRD."""


async def observe_service(
    kube: KubeClient, workers: WorkerClient, gateways: GatewayClient, namespace: str, name: str
) -> ServiceObservation | None:
    """None when there is no such service, or when it or its namespace is being deleted (its children go with it)."""
    live = await kube.get(names.INFERENCE_SERVICE, namespace, name)
    if live is None or live["metadata"].get("deletionTimestamp") or await terminating(kube, namespace):
        return None
    spec, status = parse_service(live)
    labels = {names.LABEL_SERVICE: name}
    lists = await asyncio.gather(*(kube.list(kind, namespace, labels) for kind in ("Pod", *_CHILD_KINDS)))
    pods = sorted((parse_pod(pod) for pod in lists[0]), key=lambda pod: pod.name)
    children = {
        (kind, item["metadata"]["name"]): item
        for kind, items in zip(_CHILD_KINDS, lists[1:], strict=True)
        for item in items
    }
    worker_pods = tuple(pod for pod in pods if pod.role == names.ROLE_WORKER)
    gateway_pods = tuple(pod for pod in pods if pod.role == names.ROLE_GATEWAY)
    reports, views, stores = await asyncio.gather(
        _reports(workers, worker_pods),
        _views(gateways, gateway_pods),
        _stores(kube, namespace, _store_names(spec, status)),
    )
    return ServiceObservation(
        namespace=namespace,
        name=name,
        uid=live["metadata"]["uid"],
        generation=live["metadata"].get("generation", 0),
        spec=spec,
        status=status,
        resource_version=live["metadata"]["resourceVersion"],
        live_status=live.get("status") or {},
        revisions=_revisions(children.values()),
        workers=worker_pods,
        gateways=gateway_pods,
        reports=reports,
        views=views,
        stores=stores,
        children=children,
    )


async def terminating(kube: KubeClient, namespace: str) -> bool:
    """Is the whole namespace going away? Then nothing can be created in it any more."""
    live = await kube.get("Namespace", None, namespace)
    return live is None or bool(live["metadata"].get("deletionTimestamp"))


def _revisions(children: Iterable[Object]) -> tuple[Revision, ...]:
    """Oldest first. A gateway's Deployment makes ReplicaSets that carry the service's label too; those are not ours."""
    found = [
        parse_replica_set(child)
        for child in children
        if child["kind"] == "ReplicaSet" and child["metadata"]["labels"].get(names.LABEL_ROLE) == names.ROLE_WORKER
    ]
    return tuple(sorted(found, key=lambda revision: (str(revision.created), revision.name)))


def parse_service(live: Object) -> tuple[InferenceServiceSpec, InferenceServiceStatus]:
    try:
        spec = InferenceServiceSpec.model_validate(live["spec"])
        return spec, InferenceServiceStatus.model_validate(live.get("status") or {})
    except ValueError as error:
        raise InvalidSpec(str(error)) from error


def _store_names(spec: InferenceServiceSpec, status: InferenceServiceStatus) -> set[str]:
    wanted = {spec.cache.l3.kv_store_ref.name} if spec.cache.l3 else set()
    return wanted | {claim.store for claim in status.kv_namespaces if claim.store}


async def _reports(client: WorkerClient, pods: tuple[Pod, ...]) -> dict[str, WorkerReport]:
    asked = [pod for pod in pods if pod.ip and pod.phase == "Running" and not pod.terminating]
    answers = await _limited([client.report(pod.ip) for pod in asked])
    return {pod.name: answer for pod, answer in zip(asked, answers, strict=True)}


async def _views(client: GatewayClient, pods: tuple[Pod, ...]) -> tuple[GatewayView, ...]:
    """Of gateways that take requests: a pod that has an address and is not on its way out."""
    asked = [pod for pod in pods if pod.ip and pod.phase == "Running" and not pod.terminating]
    answers = await _limited([client.healthy_workers(pod.ip) for pod in asked])
    return tuple(GatewayView(pod.name, answer) for pod, answer in zip(asked, answers, strict=True))


async def _stores(kube: KubeClient, namespace: str, wanted: set[str]) -> dict[str, StoreView]:
    found: dict[str, StoreView] = {}
    for name in sorted(wanted):
        live = await kube.get(names.KV_STORE, namespace, name)
        found[name] = StoreView(name) if live is None else _store_view(name, live)
    return found


def _store_view(name: str, live: Object) -> StoreView:
    status = KVStoreStatus.model_validate(live.get("status") or {})
    return StoreView(name, True, bool(live["metadata"].get("deletionTimestamp")), status)


async def _limited(calls: list[Any], limit: int = 32) -> list[Any]:
    gate = asyncio.Semaphore(limit)

    async def one(call):
        async with gate:
            return await call

    return await asyncio.gather(*(one(call) for call in calls))
