"""The plan for one InferenceService: from everything that was observed to everything that is to be written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from moonpool_api import names
from moonpool_api.conditions import Condition, merge_conditions
from moonpool_api.inference_service import (
    CapacityStatus,
    InferenceServiceStatus,
    KVNamespaceStatus,
    RevisionStatus,
    RolloutStatus,
)
from moonpool_api.quantity import parse_duration

from moonpool_operator.clients.kube import Object
from moonpool_operator.observe.model import Revision, ServiceObservation
from moonpool_operator.plan import conditions as c
from moonpool_operator.plan import service_conditions as judged
from moonpool_operator.plan.claims import BakePolicy, NeededNamespace, pending, plan_claims, registered_tenant
from moonpool_operator.plan.fleet import Fleet, sort_out
from moonpool_operator.plan.grants import PodOrder, order_pods
from moonpool_operator.plan.progress import Situation, rollout_status
from moonpool_operator.plan.render.common import owner_reference
from moonpool_operator.plan.render.gateway import gateway_children
from moonpool_operator.plan.render.weights import Refused
from moonpool_operator.plan.render.worker import WorkerTemplate, render_worker, replica_set, workers_service
from moonpool_operator.plan.rollout import Limits, RevisionCount, complete, next_counts
from moonpool_operator.plan.sizing import DoesNotFit
from moonpool_operator.plan.story import Story, tell_service
from moonpool_operator.plan.verify import Verification, verify
from moonpool_operator.settings import Settings

#: Old ReplicaSets that are kept when their tenants are kept too (flush: Keep, or a store that is down).
MAX_OLD_REVISIONS = 10
#: Seconds between two looks at what no Kubernetes event tells: a worker that loads, a gateway that takes it in.
POLL, SLOW_POLL = 1.0, 10.0


@dataclass(frozen=True)
class ServicePlan:
    """In the order in which it is carried out: children, status, pins, pod orders, scales, deletions."""

    status: InferenceServiceStatus
    children: list[Object] = field(default_factory=list)
    pins: Mapping[str, str] = field(default_factory=dict)
    orders: list[PodOrder] = field(default_factory=list)
    scales: Mapping[str, int] = field(default_factory=dict)
    deletes: list[str] = field(default_factory=list)
    stories: list[Story] = field(default_factory=list)
    #: Look again after so many seconds; None: the next event is soon enough.
    requeue: float | None = None


@dataclass(frozen=True)
class _Goal:
    """The revision that the service moves to. ``held`` is why the spec's own revision is not it."""

    revision: str
    worker: WorkerTemplate | None
    held: tuple[str, str] | None = None


def plan_service(seen: ServiceObservation, settings: Settings, now: datetime, refusal: str = "") -> ServicePlan:
    """``refusal``: why the API server does not take the spec's revision."""
    owner = owner_reference(names.INFERENCE_SERVICE, seen.name, seen.uid)
    goal = _goal(seen, settings, refusal)
    fleet = sort_out(seen, now, settings.lost_pod_deadline)
    checked = verify(seen.revisions, fleet.live, seen.reports, seen.status.pinned)
    counts = _counts(seen, goal, fleet)
    new = fleet.count(goal.revision, _replicas(seen, goal.revision))
    done = bool(goal.revision) and complete(new, len(fleet.others(goal.revision)), seen.spec.replicas)
    revisions = _revision_statuses(seen, goal, fleet, checked, counts)
    claims = _claims(seen, goal, fleet, revisions, done, now)
    situation = Situation(
        seen.name, fleet, new, seen.spec.replicas, done, seen.spec.paused, seen.spec.rollout.flush,
        checked.verdicts, claims, seen.stores,
    )  # fmt: skip
    rollout = seen.status.rollout
    if goal.revision:
        rollout = rollout_status(rollout, goal.revision, situation, revisions != seen.status.revisions, now)
    conditions = _conditions(seen, goal, fleet, checked, claims, rollout, done, now)
    status = _status(seen, goal, fleet, revisions, claims, rollout, conditions, checked, now)
    orders = order_pods(seen, fleet.live, checked.verdicts, claims)
    children = [workers_service(seen.namespace, seen.name, owner)]
    children += gateway_children(seen.namespace, seen.name, owner, seen.spec, settings)
    if goal.worker is not None and goal.worker.revision == goal.revision:
        pin = checked.revision_pins.get(goal.revision, "")
        replicas = counts[goal.revision]
        children.append(replica_set(seen.namespace, seen.name, owner, goal.worker, replicas, pin))
    return ServicePlan(
        status=status,
        children=children,
        pins=_pins(seen, checked),
        orders=orders,
        scales=_scales(seen, goal, counts),
        deletes=_deletes(seen, goal, fleet, claims),
        stories=tell_service(seen.status, status),
        requeue=_requeue(seen, fleet, checked, conditions, claims, rollout, orders, now),
    )


def _goal(seen: ServiceObservation, settings: Settings, refusal: str) -> _Goal:
    present = seen.status.rollout.to_revision if seen.status.rollout else ""
    if seen.revisions and all(each.revision != present for each in seen.revisions):
        # It was announced and never made; without a template it can't be, so the newest that exists goes on.
        present = seen.revisions[-1].revision
    try:
        worker = render_worker(seen.namespace, seen.name, seen.spec, settings)
    except Refused as refused:
        return _Goal(present, None, (refused.reason, str(refused)))
    except DoesNotFit as misfit:
        return _Goal(present, None, ("DoesNotFit", str(misfit)))
    if refusal:
        return _Goal(present, None, ("Refused", refusal))
    if seen.spec.paused and worker.revision != present:
        return _Goal(present, None, ("Paused", f"spec.paused holds the rollout to revision {worker.revision}"))
    return _Goal(worker.revision, worker)


def _replicas(seen: ServiceObservation, revision: str) -> int:
    return next((each.replicas for each in seen.revisions if each.revision == revision), 0)


def _counts(seen: ServiceObservation, goal: _Goal, fleet: Fleet) -> dict[str, int]:
    """Replicas by revision, after this step."""
    old = [each for each in seen.revisions if each.revision != goal.revision]
    held = {each.revision: each.replicas for each in old}
    if not goal.revision:
        return held
    new = fleet.count(goal.revision, _replicas(seen, goal.revision))
    rolling = any(each.replicas for each in old) or bool(fleet.others(goal.revision))
    if seen.spec.paused and rolling:
        return held | {goal.revision: new.replicas}
    limits = Limits(seen.spec.replicas, seen.spec.rollout.max_surge, seen.spec.rollout.max_unavailable)
    counted: list[RevisionCount] = [fleet.count(each.revision, each.replicas) for each in old]
    return next_counts(new, counted, len(fleet.leaving), limits)


def _revision_statuses(
    seen: ServiceObservation, goal: _Goal, fleet: Fleet, checked: Verification, counts: dict[str, int]
) -> list[RevisionStatus]:
    before = {each.name: each for each in seen.status.revisions}
    made = [_revision_status(each, fleet, checked, before.get(each.revision)) for each in seen.revisions]
    if goal.worker is not None and all(each.name != goal.revision for each in made):
        known = before.get(goal.revision, RevisionStatus(name=goal.revision))
        version = goal.worker.expectation.weight_version
        update = {"weight_version": version, "replicas": counts[goal.revision], "ready": 0}
        made.append(known.model_copy(update=update))
    return made


def _revision_status(
    revision: Revision, fleet: Fleet, checked: Verification, before: RevisionStatus | None
) -> RevisionStatus:
    verified = [
        verdict
        for pod in fleet.of(revision.revision)
        if (verdict := checked.verdicts.get(pod.name)) is not None and verdict.verified
    ]
    return RevisionStatus(
        name=revision.revision,
        weight_version=revision.expectation.weight_version,
        replicas=revision.replicas,
        ready=fleet.count(revision.revision, revision.replicas).ready,
        namespace=verified[0].namespace if verified else (before.namespace if before else None),
        weights_digest=verified[0].digest if verified else (before.weights_digest if before else None),
    )


def _claims(
    seen: ServiceObservation,
    goal: _Goal,
    fleet: Fleet,
    revisions: list[RevisionStatus],
    done: bool,
    now: datetime,
) -> list[KVNamespaceStatus]:
    stores = {each.revision: each.expectation.store for each in seen.revisions}
    if goal.worker is not None:
        stores[goal.revision] = goal.worker.expectation.store
    needed = [
        NeededNamespace(
            hash=each.namespace,
            store=stores[each.name],
            revision=each.name,
            weight_version=each.weight_version,
            current=each.name == goal.revision,
        )
        for each in revisions
        if each.namespace and stores.get(each.name) and (each.name == goal.revision or fleet.exists(each.name))
    ]
    policy = BakePolicy(
        flush=seen.spec.rollout.flush,
        seconds=parse_duration(seen.spec.rollout.bake),
        complete=done,
        paused=seen.spec.paused,
    )
    return plan_claims(seen.status.kv_namespaces, needed, seen.stores, policy, now)


def _conditions(
    seen: ServiceObservation,
    goal: _Goal,
    fleet: Fleet,
    checked: Verification,
    claims: list[KVNamespaceStatus],
    rollout: RolloutStatus | None,
    done: bool,
    now: datetime,
) -> list[Condition]:
    store = seen.spec.cache.l3.kv_store_ref.name if seen.spec.cache.l3 else ""
    children = [
        judged.workers_ready(seen, fleet),
        judged.namespace_verified(fleet, goal.revision, checked.verdicts),
        judged.cache_ready(seen, fleet, goal.revision, checked.verdicts, store),
        judged.gateway_ready(seen),
        judged.rollout_complete(seen, rollout, done, goal.held, now),
        judged.l3_flushed(seen, claims),
    ]
    return c.tree(children, seen.generation)


def _status(
    seen: ServiceObservation,
    goal: _Goal,
    fleet: Fleet,
    revisions: list[RevisionStatus],
    claims: list[KVNamespaceStatus],
    rollout: RolloutStatus | None,
    conditions: list[Condition],
    checked: Verification,
    now: datetime,
) -> InferenceServiceStatus:
    ready = sum(fleet.count(each.name, each.replicas).ready for each in revisions)
    namespace = next((each.namespace for each in revisions if each.name == goal.revision), None)
    serving = fleet.count(goal.revision, 0).available > 0
    text = now.strftime("%Y-%m-%dT%H:%M:%SZ")
    return InferenceServiceStatus(
        observed_generation=seen.generation,
        conditions=merge_conditions(seen.status.conditions, conditions, text),
        replicas=len(fleet.live),
        ready_replicas=ready,
        selector=f"{names.LABEL_SERVICE}={seen.name},{names.LABEL_ROLE}={names.ROLE_WORKER}",
        active_namespace=namespace if namespace and serving else seen.status.active_namespace,
        revisions=revisions,
        rollout=rollout,
        kv_namespaces=claims,
        pinned=list(checked.pins),
        capacity=_capacity(seen, goal, fleet, checked, claims) or seen.status.capacity,
        gateway=f"http://{names.gateway_name(seen.name)}.{seen.namespace}.svc:{names.PORT_GATEWAY}",
    )


def _capacity(
    seen: ServiceObservation, goal: _Goal, fleet: Fleet, checked: Verification, claims: list[KVNamespaceStatus]
) -> CapacityStatus | None:
    """Of one worker of the goal; L3 is what the tenant's quota holds."""
    for pod in fleet.of(goal.revision):
        verdict, report = checked.verdicts.get(pod.name), seen.reports.get(pod.name)
        if verdict is None or not verdict.verified or report is None or not report.bytes_per_token:
            continue
        quota = 0
        for claim in claims:
            if claim.state == "Active" and claim.hash == verdict.namespace and claim.store in seen.stores:
                tenant = registered_tenant(claim.hash, claim.store, seen.stores)
                ledger = seen.stores[claim.store].status.tenants
                quota = next((entry.quota for entry in ledger if entry.name == tenant), 0)
        return CapacityStatus(
            bytes_per_token=report.bytes_per_token,
            l1_tokens=report.l1_tokens,
            l2_tokens=report.l2_tokens,
            l3_tokens=quota // report.bytes_per_token,
        )
    return None


def _pins(seen: ServiceObservation, checked: Verification) -> dict[str, str]:
    """ReplicaSet name to the digest that has to be written on it."""
    return {
        each.name: checked.revision_pins[each.revision]
        for each in seen.revisions
        if each.revision in checked.revision_pins and each.pinned_digest != checked.revision_pins[each.revision]
    }


def _scales(seen: ServiceObservation, goal: _Goal, counts: dict[str, int]) -> dict[str, int]:
    """ReplicaSet name to new size, of those that are not applied as a whole."""
    applied = goal.revision if goal.worker is not None else ""
    return {
        each.name: counts[each.revision]
        for each in seen.revisions
        if each.revision != applied and counts.get(each.revision, each.replicas) != each.replicas
    }


def _deletes(seen: ServiceObservation, goal: _Goal, fleet: Fleet, claims: list[KVNamespaceStatus]) -> list[str]:
    """Old ReplicaSets without pods whose tenant is flushed (or that never had one), and the oldest beyond the limit."""
    held = {claim.revision for claim in claims if claim.state not in ("Flushed", "Lost")}
    empty = [
        each
        for each in seen.revisions
        if each.revision != goal.revision and each.replicas == 0 and not fleet.exists(each.revision)
    ]
    kept = [each for each in empty if each.revision in held][-MAX_OLD_REVISIONS:]
    return [each.name for each in empty if each not in kept]


def _requeue(
    seen: ServiceObservation,
    fleet: Fleet,
    checked: Verification,
    conditions: list[Condition],
    claims: list[KVNamespaceStatus],
    rollout: RolloutStatus | None,
    orders: list[PodOrder],
    now: datetime,
) -> float | None:
    """The soonest time at which something may have changed that no Kubernetes event will tell."""
    delays: list[float] = []
    late = judged.seconds_to_deadline(seen, rollout, now) if rollout else None
    poll = SLOW_POLL if late is not None and late <= 0 else POLL
    loading = any(pod.ip and pod.name not in checked.verdicts for pod in fleet.live)
    unlisted = any(pod.ready and pod.name not in fleet.listed for pod in fleet.live)
    if loading or unlisted or orders:
        delays.append(poll)
    if any(condition.type == c.CACHE_READY and condition.reason == "L3Opening" for condition in conditions):
        delays.append(POLL)
    if any(condition.type == c.CACHE_READY and condition.status == "False" for condition in conditions):
        delays.append(5.0)
    if any(condition.type == c.GATEWAY_READY and condition.reason == "NotAnswering" for condition in conditions):
        delays.append(2.0)
    if any(condition.status == "False" and condition.type == c.NAMESPACE_VERIFIED for condition in conditions):
        delays.append(SLOW_POLL)
    if fleet.leaving:
        delays.append(30.0)
    if any(pending(claim, seen.name, seen.stores) for claim in claims):
        delays.append(5.0)
    for claim in claims:
        # While paused nothing is given up when a bake ends, and the edit that ends the pause is an event.
        if claim.state == "Draining" and claim.bake_until and not seen.spec.paused:
            until = datetime.fromisoformat(claim.bake_until.replace("Z", "+00:00"))
            delays.append(max(0.2, (until - now).total_seconds()))
    if late is not None and late > 0 and any(x.type == c.ROLLOUT_COMPLETE and x.status == "False" for x in conditions):
        delays.append(late + 0.5)
    return min(delays) if delays else None
