"""The conditions of an InferenceService, each from the facts that it is about."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime

from moonpool_api.conditions import Condition, find
from moonpool_api.inference_service import KVNamespaceStatus, RolloutStatus
from moonpool_api.quantity import format_bytes, parse_duration

from moonpool_operator.observe.model import Pod, ServiceObservation
from moonpool_operator.plan import conditions as c
from moonpool_operator.plan.claims import pending, registered_tenant
from moonpool_operator.plan.fleet import Fleet, serves
from moonpool_operator.plan.progress import flush_words
from moonpool_operator.plan.verify import Verdict


def workers_ready(seen: ServiceObservation, fleet: Fleet) -> Condition:
    wanted = seen.spec.replicas
    ready = sum(serves(pod) for pod in fleet.live)
    words = f"{ready} of {wanted} workers are ready"
    if wanted == 0:
        return c.condition(c.WORKERS_READY, True, "ScaledToZero", "spec.replicas is 0")
    if ready >= wanted:
        return c.condition(c.WORKERS_READY, True, "AllReady", words)
    for revision in seen.revisions:
        if revision.trouble and revision.replicas:
            return c.condition(c.WORKERS_READY, False, "PodsNotCreated", f"{words}; {revision.trouble}")
    for pod in _newest_first(fleet.live):
        if pod.trouble and not serves(pod):
            return c.condition(
                c.WORKERS_READY, False, _reason(pod.trouble_reason), f"{words}; {pod.name}: {pod.trouble}"
            )
    return c.condition(c.WORKERS_READY, False, "NotReady", words)


def namespace_verified(fleet: Fleet, goal: str, verdicts: Mapping[str, Verdict]) -> Condition:
    live = {pod.name for pod in fleet.live}
    refused = sorted((v for v in verdicts.values() if v.refused and v.pod in live), key=lambda v: v.pod)
    if refused:
        message = "; ".join(verdict.message for verdict in refused[:3])
        return c.condition(c.NAMESPACE_VERIFIED, False, refused[0].reason, message)
    namespaces = sorted({verdicts[pod.name].namespace for pod in fleet.of(goal) if pod.name in verdicts})
    if namespaces:
        digest = next(verdicts[pod.name].digest for pod in fleet.of(goal) if pod.name in verdicts)
        return c.condition(
            c.NAMESPACE_VERIFIED, True, "Verified", f"KV namespace {', '.join(namespaces)}, weights {digest}"
        )
    if not fleet.of(goal):
        return c.condition(c.NAMESPACE_VERIFIED, "Unknown", "NoWorkers", "no worker has reported what it loaded")
    return c.condition(c.NAMESPACE_VERIFIED, "Unknown", "Loading", "workers are still loading")


def cache_ready(
    seen: ServiceObservation, fleet: Fleet, goal: str, verdicts: Mapping[str, Verdict], store: str
) -> Condition:
    if not store:
        return c.condition(c.CACHE_READY, True, "L3Disabled", "cache.l3 is not set; L1 and L2 serve")
    view = seen.stores.get(store)
    if view is None or not view.exists:
        return c.condition(c.CACHE_READY, False, "KVStoreNotFound", f"there is no KVStore {store!r}; L3 is off")
    workers = [pod for pod in fleet.of(goal) if pod.name in verdicts and verdicts[pod.name].verified]
    if not workers:
        if seen.spec.replicas == 0:
            return c.condition(c.CACHE_READY, True, "NoWorkers", "there is no worker to open L3")
        return c.condition(c.CACHE_READY, "Unknown", "WaitingForWorkers", "L3 is granted to verified workers")
    master = find(view.status.conditions, c.MASTER_READY)
    if master is None or master.status != "True":
        words = master.message if master else "has no status yet"
        return c.condition(c.CACHE_READY, False, "StoreNotReady", f"KVStore {store}: {words}")
    if not view.status.segments:
        return c.condition(c.CACHE_READY, False, "StoreNotReady", f"KVStore {store} has no memory mounted")
    for pod in workers:
        report = seen.reports[pod.name]
        if not registered_tenant(verdicts[pod.name].namespace, store, seen.stores):
            return c.condition(c.CACHE_READY, False, "TenantPending", f"KVStore {store} has not registered the tenant")
        if report.l3_state != "open":
            words = f"{pod.name}: L3 is {report.l3_state}{f' ({report.l3_error})' if report.l3_error else ''}"
            reason = "L3Failing" if report.l3_state == "failing" else "L3Opening"
            return c.condition(c.CACHE_READY, False, reason, words)
    return c.condition(c.CACHE_READY, True, "L3Open", f"KVStore {store} is open on every worker ({len(workers)})")


def gateway_ready(seen: ServiceObservation) -> Condition:
    ready = [pod for pod in seen.gateways if pod.ready and not pod.terminating]
    wanted = seen.spec.gateway.replicas
    words = f"{len(ready)} of {wanted} gateway pods are ready"
    if len(ready) < wanted:
        troubled = next((pod for pod in seen.gateways if pod.trouble), None)
        if troubled:
            reason = _reason(troubled.trouble_reason)
            return c.condition(c.GATEWAY_READY, False, reason, f"{words}; {troubled.name}: {troubled.trouble}")
        return c.condition(c.GATEWAY_READY, False, "NotReady", words)
    silent = [view.pod for view in seen.views if view.workers is None and any(p.name == view.pod for p in ready)]
    if silent:
        return c.condition(c.GATEWAY_READY, False, "NotAnswering", f"{', '.join(silent)}: GET /workers is not answered")
    # A gateway that runs and knows no worker answers every request with 404: that is not ready in a user's eyes.
    idle = [view.pod for view in seen.views if not view.workers and any(p.name == view.pod for p in ready)]
    if idle and seen.spec.replicas > 0:
        return c.condition(c.GATEWAY_READY, False, "NoWorkers", f"{', '.join(idle)} routes to no worker yet")
    return c.condition(c.GATEWAY_READY, True, "AllReady", words)


def rollout_complete(
    seen: ServiceObservation, rollout: RolloutStatus | None, done: bool, held: tuple[str, str] | None, now: datetime
) -> Condition:
    """``held``: (reason, message) of an edit that was not started: refused, or paused."""
    if held is not None:
        return c.condition(c.ROLLOUT_COMPLETE, False, *held)
    if rollout is None:
        return c.condition(c.ROLLOUT_COMPLETE, "Unknown", "NoRevision", "")
    if done:
        return c.condition(c.ROLLOUT_COMPLETE, True, "Complete", f"revision {rollout.to_revision} serves")
    late = seconds_to_deadline(seen, rollout, now)
    if late is not None and late <= 0:
        words = f"no progress for {seen.spec.rollout.progress_deadline}; {rollout.message}"
        return c.condition(c.ROLLOUT_COMPLETE, False, "ProgressDeadlineExceeded", words)
    return c.condition(c.ROLLOUT_COMPLETE, False, rollout.step, rollout.message)


def seconds_to_deadline(seen: ServiceObservation, rollout: RolloutStatus, now: datetime) -> float | None:
    since = rollout.progressed or rollout.started
    if not since or seen.spec.paused:
        return None
    begun = datetime.fromisoformat(since.replace("Z", "+00:00"))
    return parse_duration(seen.spec.rollout.progress_deadline) - (now - begun).total_seconds()


def l3_flushed(seen: ServiceObservation, claims: Sequence[KVNamespaceStatus]) -> Condition:
    """True when no KV of an older version is left in any store, with the last proof in the message."""
    draining = [claim for claim in claims if claim.state == "Draining"]
    waiting = [claim for claim in claims if pending(claim, seen.name, seen.stores)]
    if waiting:
        words = "; ".join(flush_words(claim, seen.stores) for claim in waiting)
        return c.condition(c.L3_FLUSHED, False, "Flushing", words)
    if draining and seen.spec.rollout.flush == "Keep":
        return c.condition(c.L3_FLUSHED, "Unknown", "Kept", "rollout.flush is Keep: old KV stays in the store")
    if draining:
        until = max((claim.bake_until or "" for claim in draining), default="")
        words = f"old KV is kept until {until}" if until else "old workers are still being replaced"
        return c.condition(c.L3_FLUSHED, False, "Baking" if until else "RolloutInProgress", words)
    over = [claim for claim in claims if claim.state in ("Flushed", "Lost")]
    if not over:
        return c.condition(c.L3_FLUSHED, True, "NothingToFlush", "no older KV was ever written")
    last = max(over, key=lambda claim: claim.since)
    if last.state == "Lost" or last.proof is None:
        return c.condition(c.L3_FLUSHED, "Unknown", "CacheLost", f"{last.tenant}: the store lost it; there is no proof")
    proof = last.proof
    words = (
        f"{last.tenant} (weights {last.weight_version}): {format_bytes(proof.bytes_before)} before the fence, "
        f"{format_bytes(proof.bytes_evicted)} evicted after it, {proof.objects_removed} objects "
        f"({format_bytes(proof.bytes_removed)}) removed, then the store deleted the tenant "
        f"({proof.delete_status}) after {proof.seconds:.1f} s"
    )
    if proof.lost:
        words += "; a restart of the master had emptied the store before"
    return c.condition(c.L3_FLUSHED, True, "Flushed", words)


def _newest_first(pods: Sequence[Pod]) -> list[Pod]:
    return sorted(pods, key=lambda pod: (str(pod.created), pod.name), reverse=True)


def _reason(text: str) -> str:
    """A condition's reason must be one CamelCase word."""
    word = "".join(ch for ch in text if ch.isalnum())
    return word[:1].upper() + word[1:] if word and word[0].isalpha() else "NotReady"
