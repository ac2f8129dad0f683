"""One reconcile of an InferenceService."""

from __future__ import annotations

import time

import structlog
from moonpool_api import names
from moonpool_api.inference_service import InferenceServiceStatus

from moonpool_operator import metrics
from moonpool_operator.apply import pods
from moonpool_operator.apply.children import apply_children
from moonpool_operator.apply.status import tell, write_status
from moonpool_operator.observe.model import ServiceObservation
from moonpool_operator.observe.service import observe_service
from moonpool_operator.plan.service import ServicePlan, plan_service
from moonpool_operator.reconcile.context import Context

log = structlog.get_logger()

#: When each rollout entered its step: for the metric alone, nothing is decided by it.
_step_since: dict[tuple[str, str], tuple[str, float]] = {}


async def reconcile_service(context: Context, namespace: str, name: str) -> float | None:
    """Seconds until the next look, or None when events will tell."""
    seen = await observe_service(context.kube, context.workers, context.gateways, namespace, name)
    if seen is None:
        _step_since.pop((namespace, name), None)
        return None
    plan = plan_service(seen, context.settings, context.clock())
    if refusal := await _refusal(context, seen, plan):
        plan = plan_service(seen, context.settings, context.clock(), refusal)
    await _carry_out(context, seen, plan)
    _measure_step(namespace, name, plan.status)
    return plan.requeue


async def _refusal(context: Context, seen: ServiceObservation, plan: ServicePlan) -> str:
    """Why the API server won't take a new revision, or "".

    Not every bad spec is caught by the CRD's schema (requests above limits, an impossible node selector). Asked
    before anything is written, it is one more refused edit, and the present workers are cared for as before.
    """
    for child in plan.children:
        if child["kind"] == "ReplicaSet" and ("ReplicaSet", child["metadata"]["name"]) not in seen.children:
            return await context.kube.refusal(child)
    return ""


async def _carry_out(context: Context, seen: ServiceObservation, plan: ServicePlan) -> None:
    """In an order in which dying between any two writes is harmless.

    Claims and pins are in the status before anything is granted on their strength, and a pin is on the ReplicaSet
    before the first gate of its revision opens.
    """
    kube, namespace = context.kube, seen.namespace
    wrote, _ = await write_status(
        kube,
        names.INFERENCE_SERVICE,
        namespace,
        seen.name,
        seen.live_status,
        plan.status.to_api(),
        seen.resource_version,
    )
    await apply_children(kube, plan.children, seen.children)
    if wrote:
        await tell(kube, names.INFERENCE_SERVICE, namespace, seen.name, seen.uid, plan.stories)
    for replica_set, digest in plan.pins.items():
        annotations = {names.ANNOTATION_PINNED_DIGEST: digest}
        await kube.merge("ReplicaSet", namespace, replica_set, {"metadata": {"annotations": annotations}})
    await pods.carry_out(kube, context.workers, namespace, plan.orders)
    for replica_set, replicas in plan.scales.items():
        log.info("scale", namespace=namespace, replica_set=replica_set, replicas=replicas)
        await kube.merge("ReplicaSet", namespace, replica_set, {"spec": {"replicas": replicas}})
    for replica_set in plan.deletes:
        await kube.delete("ReplicaSet", namespace, replica_set)


def _measure_step(namespace: str, name: str, status: InferenceServiceStatus) -> None:
    step, now = (status.rollout.step if status.rollout else ""), time.monotonic()
    last, since = _step_since.get((namespace, name), ("", now))
    if step != last:
        if last and last != "Complete":
            metrics.ROLLOUT_STEP_SECONDS.labels(step=last).observe(now - since)
        _step_since[(namespace, name)] = (step, now)
