"""What is written on worker pods: annotations first, then the gate, then a nudge to the worker itself."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from datetime import UTC, datetime

import structlog
from moonpool_api import names

from moonpool_operator.clients.kube import ApiError, KubeClient
from moonpool_operator.clients.worker import WorkerClient
from moonpool_operator.plan.grants import PodOrder

log = structlog.get_logger()


async def carry_out(kube: KubeClient, workers: WorkerClient, namespace: str, orders: Iterable[PodOrder]) -> None:
    await asyncio.gather(*(_one(kube, workers, namespace, order) for order in orders))


async def _one(kube: KubeClient, workers: WorkerClient, namespace: str, order: PodOrder) -> None:
    try:
        if order.annotations is not None:
            # The uid makes sure that it is this very pod: the API server refuses to change a uid.
            metadata = {"uid": order.uid, "annotations": dict(order.annotations)}
            await kube.merge("Pod", namespace, order.pod, {"metadata": metadata})
        if order.gate is not None:
            await kube.patch_pod_status(namespace, order.pod, {"metadata": {"uid": order.uid}, **_gate(order)})
    except ApiError as error:
        if error.not_found or error.conflict:
            return  # The pod went away meanwhile.
        raise
    if order.nudge:
        problem = await workers.grant(order.ip, order.namespace, order.tenant, order.master)
        if problem:
            log.info("worker did not take the nudge", namespace=namespace, pod=order.pod, problem=problem)


def _gate(order: PodOrder) -> dict:
    return {
        "status": {
            "conditions": [
                {
                    "type": names.READINESS_GATE,
                    "status": "True" if order.gate else "False",
                    "reason": order.reason,
                    "message": order.message[:1000],
                    "lastTransitionTime": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
                }
            ]
        }
    }
