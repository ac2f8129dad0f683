"""One reconcile of a KVStore: its children, and the ledger of its tenants."""

from __future__ import annotations

from dataclasses import replace

import structlog
from moonpool_api import names
from moonpool_api.kv_store import KVStoreStatus

from moonpool_operator import metrics
from moonpool_operator.apply.children import apply_children
from moonpool_operator.apply.status import tell, write_status
from moonpool_operator.apply.tenants import make_call
from moonpool_operator.clients.mooncake import MasterUnavailable, MooncakeAdmin
from moonpool_operator.observe.model import StoreObservation
from moonpool_operator.observe.store import observe_demand, observe_store, running_master, with_master
from moonpool_operator.plan.render.common import owner_reference
from moonpool_operator.plan.render.store import store_children
from moonpool_operator.plan.store import requeue_after, store_status
from moonpool_operator.plan.story import tell_store
from moonpool_operator.plan.tenants import TenantPlan, plan_tenants, record
from moonpool_operator.reconcile.context import Context

log = structlog.get_logger()

#: Rounds of "plan, write, call" in one reconcile; a flush without obstacles takes five.
MAX_ROUNDS = 12


async def reconcile_store(context: Context, namespace: str, name: str) -> float | None:
    """Seconds until the next look, or None when the store is gone."""
    deadline = context.settings.lost_pod_deadline
    seen = await observe_store(context.kube, context.admin_of, namespace, name, deadline)
    if seen is None:
        return None
    if seen.deleting or seen.namespace_terminating:
        return await _let_go(context, seen)
    if not seen.finalized:
        await _set_finalizers(context, seen, [*seen.finalizers, names.FINALIZER])
        return 0.0
    owner = owner_reference(names.KV_STORE, name, seen.uid)
    children = store_children(namespace, name, owner, seen.spec, context.settings)
    await apply_children(context.kube, children, seen.children)
    return await _tend_tenants(context, seen)


async def _tend_tenants(context: Context, seen: StoreObservation) -> float:
    """Plan, write the ledger, make the calls it names; again until nothing is left to do or something has to wait."""
    for _ in range(MAX_ROUNDS):
        plan = _plan(context, seen)
        seen = await _write(context, seen, plan)
        master = running_master(seen.master_pods)
        if not plan.calls or master is None or seen.tenants is None:
            return requeue_after(seen, plan)
        seen, progressed = await _make_calls(context, seen, plan, context.admin_of(master))
        if not progressed:
            return requeue_after(seen, plan)
        seen = await with_master(await _with_demand(context, seen), context.admin_of)
    return 0.0


def _plan(context: Context, seen: StoreObservation) -> TenantPlan:
    return plan_tenants(
        seen.status.tenants, seen.status.retired, seen.claims, seen.grants, seen.tenants, seen.figures, context.clock()
    )


async def _make_calls(
    context: Context, seen: StoreObservation, plan: TenantPlan, admin: MooncakeAdmin
) -> tuple[StoreObservation, bool]:
    """One call per tenant and round, in order. Returns whether it is worth to go on at once."""
    ledger, progressed = list(seen.status.tenants), False
    for call in plan.calls:
        try:
            answer = await make_call(admin, call)
        except MasterUnavailable as error:
            log.warning("store call failed", store=seen.name, verb=call.verb, tenant=call.tenant, error=str(error))
            break
        log.info("store call", store=seen.name, verb=call.verb, tenant=call.tenant, answer=str(answer))
        ledger = record(ledger, call, answer, seen.claims, context.clock())
        # A removal that found nothing waits for the store, so does a refused deletion.
        waits = answer == 0 or getattr(answer, "status", 200) == 409
        progressed = progressed or not waits
    status = seen.status.model_copy(update={"tenants": ledger})
    return await _write_status(context, seen, status), progressed


async def _with_demand(context: Context, seen: StoreObservation) -> StoreObservation:
    deadline = context.settings.lost_pod_deadline
    services, claims, grants = await observe_demand(context.kube, seen.namespace, seen.name, deadline)
    return replace(seen, services=services, claims=claims, grants=grants)


async def _write(context: Context, seen: StoreObservation, plan: TenantPlan) -> StoreObservation:
    return await _write_status(context, seen, store_status(seen, plan, context.clock()))


async def _write_status(context: Context, seen: StoreObservation, status: KVStoreStatus) -> StoreObservation:
    body = status.to_api()
    wrote, version = await write_status(
        context.kube, names.KV_STORE, seen.namespace, seen.name, seen.live_status, body, seen.resource_version
    )
    if wrote:
        _count_flushes(seen.status, status)
        await tell(context.kube, names.KV_STORE, seen.namespace, seen.name, seen.uid, tell_store(seen.status, status))
    return replace(seen, status=status, live_status=body, resource_version=version)


def _count_flushes(before: KVStoreStatus, after: KVStoreStatus) -> None:
    old = {tenant.name: tenant.state for tenant in before.tenants}
    for tenant in after.tenants:
        if tenant.state == "Flushed" and old.get(tenant.name) != "Flushed" and tenant.proof:
            metrics.FLUSH_SECONDS.observe(tenant.proof.seconds)
            metrics.FLUSH_BYTES.inc(tenant.proof.bytes_before)
            metrics.FLUSH_OBJECTS.inc(tenant.proof.objects_removed)
            metrics.TENANTS_LOST.inc(tenant.proof.lost)


async def _let_go(context: Context, seen: StoreObservation) -> float | None:
    """A store that services refer to stays, unless everything here goes away anyway: then nothing may hold it."""
    if not seen.finalized:
        return None
    if seen.services and not seen.namespace_terminating:
        await _tend_tenants(context, seen)
        return 5.0
    await _set_finalizers(context, seen, [other for other in seen.finalizers if other != names.FINALIZER])
    return None


async def _set_finalizers(context: Context, seen: StoreObservation, finalizers: list[str]) -> None:
    """The whole list, so those of others (``foregroundDeletion``) with it."""
    metadata = {"finalizers": finalizers, "resourceVersion": seen.resource_version}
    await context.kube.merge(names.KV_STORE, seen.namespace, seen.name, {"metadata": metadata})
