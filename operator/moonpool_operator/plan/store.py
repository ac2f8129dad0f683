"""The status of a KVStore from its facts and its ledger."""

from __future__ import annotations

from datetime import datetime

from moonpool_api.conditions import Condition, merge_conditions
from moonpool_api.kv_store import KVStoreStatus
from moonpool_api.quantity import format_bytes

from moonpool_operator.observe.model import StoreObservation
from moonpool_operator.observe.store import running_master
from moonpool_operator.plan import conditions as c
from moonpool_operator.plan.render.store import master_address
from moonpool_operator.plan.tenants import TenantPlan

#: Seconds between two looks: at work in progress, at a master that does not answer, and at the figures of a quiet one.
POLL_WORK, POLL_PENDING, POLL_FIGURES = 1.0, 5.0, 30.0


def store_status(seen: StoreObservation, tenants: TenantPlan, now: datetime) -> KVStoreStatus:
    """Figures keep their last value while the master does not answer."""
    before, figures = seen.status, seen.figures
    master = running_master(seen.master_pods)
    conditions = c.tree([_master_ready(seen, tenants), _segments(seen)], seen.generation)
    conditions.append(_in_use(seen).model_copy(update={"observed_generation": seen.generation}))
    return KVStoreStatus(
        observed_generation=seen.generation,
        conditions=merge_conditions(before.conditions, conditions, now.strftime("%Y-%m-%dT%H:%M:%SZ")),
        master=master_address(seen.namespace, seen.name),
        master_instance=master.instance if master else before.master_instance,
        capacity=figures.capacity if figures else before.capacity,
        used=figures.used if figures else before.used,
        keys=figures.keys if figures else before.keys,
        segments=figures.segments if figures else 0,
        tenants=tenants.ledger,
        retired=tenants.retired,
    )


def requeue_after(seen: StoreObservation, tenants: TenantPlan) -> float:
    if seen.tenants is None:
        return POLL_PENDING if tenants.waiting else POLL_PENDING * 2
    if any(entry.state == "Fenced" for entry in tenants.ledger):
        return POLL_WORK
    if tenants.waiting or seen.figures is None or not seen.figures.segments:
        return POLL_PENDING
    return POLL_FIGURES


def _master_ready(seen: StoreObservation, tenants: TenantPlan) -> Condition:
    if seen.tenants is None:
        pod = next((pod for pod in seen.master_pods if pod.trouble), None)
        message = f"{pod.name}: {pod.trouble}" if pod else seen.master_error
        return c.condition(c.MASTER_READY, False, "NotAnswering", message)
    if tenants.lost:
        words = f"the master came back empty; registered again: {', '.join(tenants.lost)}"
        return c.condition(c.MASTER_READY, False, "CacheLost", words)
    return c.condition(c.MASTER_READY, True, "Answering", "the master answers its admin API")


def _segments(seen: StoreObservation) -> Condition:
    wanted = seen.spec.stores.replicas
    if seen.figures is None:
        return c.condition(c.SEGMENTS_MOUNTED, "Unknown", "MasterNotAnswering", "the master knows what is mounted")
    words = f"{seen.figures.segments} of {wanted} segments, {format_bytes(seen.figures.capacity)}"
    if wanted == 0:
        return c.condition(c.SEGMENTS_MOUNTED, False, "NoStores", "spec.stores.replicas is 0: nothing can be kept")
    if seen.figures.segments < wanted:
        pod = next((pod for pod in seen.store_pods if pod.trouble), None)
        return c.condition(
            c.SEGMENTS_MOUNTED, False, "Missing", f"{words}; {pod.name}: {pod.trouble}" if pod else words
        )
    return c.condition(c.SEGMENTS_MOUNTED, True, "Mounted", words)


def _in_use(seen: StoreObservation) -> Condition:
    if seen.services:
        return c.condition(c.IN_USE, True, "Referenced", f"used by {', '.join(seen.services)}")
    return c.condition(c.IN_USE, False, "NotReferenced", "no InferenceService refers to it")
