"""Kubernetes Events: one for each change of state, so that `kubectl describe` tells what happened."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moonpool_api.conditions import Condition, find
from moonpool_api.inference_service import FlushProof, InferenceServiceStatus, KVNamespaceStatus
from moonpool_api.kv_store import KVStoreStatus
from moonpool_api.quantity import format_bytes

from moonpool_operator.plan import conditions as c


@dataclass(frozen=True)
class Story:
    """An Event to be: ``normal`` or a warning."""

    reason: str
    message: str
    normal: bool = True


def tell_service(before: InferenceServiceStatus, after: InferenceServiceStatus) -> list[Story]:
    """What changed between two statuses of a service."""
    return [
        *_revisions(before, after),
        *_rollout(before, after),
        *_verification(before, after),
        *_claims(before.kv_namespaces, after.kv_namespaces),
        *_readiness(before.conditions, after.conditions),
    ]


def tell_store(before: KVStoreStatus, after: KVStoreStatus) -> list[Story]:
    """What changed between two statuses of a store."""
    told = []
    old = {tenant.name: tenant for tenant in before.tenants}
    for tenant in after.tenants:
        last = old.get(tenant.name)
        if last is None or last.state != tenant.state:
            words = {
                "Registered": ("TenantRegistered", f"with a quota of {format_bytes(tenant.quota)}"),
                "Fenced": ("TenantFenced", f"closed for writes with {format_bytes(tenant.bytes)} in it"),
                "Flushed": ("TenantFlushed", _proof_words(tenant.proof)),
                "Lost": ("TenantLost", "the store knows nothing of it"),
            }
            reason, words_of = words[tenant.state]
            told.append(Story(reason, f"{tenant.name}: {words_of}", tenant.state != "Lost"))
        elif tenant.step != last.step and tenant.step == "WaitingForUnfinishedPuts":
            told.append(Story(tenant.step, f"{tenant.name}: the store releases the unfinished puts of killed writers"))
    if before.master_instance and after.master_instance and before.master_instance != after.master_instance:
        told.append(Story("CacheLost", "the master restarted, so the cache is empty", False))
    return told + _readiness(before.conditions, after.conditions)


def _revisions(before: InferenceServiceStatus, after: InferenceServiceStatus) -> list[Story]:
    known = {revision.name for revision in before.revisions}
    return [
        Story("RevisionCreated", f"revision {each.name}, weights {each.weight_version}")
        for each in after.revisions
        if each.name not in known
    ]


def _rollout(before: InferenceServiceStatus, after: InferenceServiceStatus) -> list[Story]:
    old, new = before.rollout, after.rollout
    if new is None:
        return []
    if (old is None or old.to_revision != new.to_revision) and new.from_revision:
        start = [Story("RolloutStarted", f"from revision {new.from_revision} to {new.to_revision}")]
    else:
        start = []
    same = old is not None and old.to_revision == new.to_revision
    if same and old is not None and old.step == new.step:
        return start
    if new.step in ("Draining", "Baking", "Flushing"):
        start.append(Story(new.step, new.message))
    if new.step == "Complete" and old is not None:
        start.append(Story("RolloutComplete", new.message))
    return start


def _verification(before: InferenceServiceStatus, after: InferenceServiceStatus) -> list[Story]:
    old, new = find(before.conditions, c.NAMESPACE_VERIFIED), find(after.conditions, c.NAMESPACE_VERIFIED)
    if new is None:
        return []
    if new.status == "False" and (old is None or old.message != new.message):
        return [Story("VerificationFailed", new.message, False)]
    if new.status == "True" and (old is None or old.status != "True" or old.message != new.message):
        return [Story("NamespaceVerified", new.message)]
    return []


def _claims(before: Sequence[KVNamespaceStatus], after: Sequence[KVNamespaceStatus]) -> list[Story]:
    old = {(claim.hash, claim.store, claim.tenant): claim.state for claim in before}
    told = []
    for claim in after:
        last = old.get((claim.hash, claim.store, claim.tenant))
        if last == claim.state:
            continue
        if claim.state == "Fenced":
            told.append(Story("TenantFenced", f"{claim.tenant} (weights {claim.weight_version}) is closed for writes"))
        elif claim.state == "Flushed":
            told.append(Story("TenantFlushed", f"{claim.tenant}: {_proof_words(claim.proof)}"))
        elif claim.state == "Lost":
            told.append(Story("TenantLost", f"{claim.tenant}: the store lost it, so there is no proof", False))
    return told


#: A rollout that is under way is told by its own events; only these make an object worth a warning.
_WORTH_A_WARNING = (
    c.WORKERS_READY,
    c.NAMESPACE_VERIFIED,
    c.CACHE_READY,
    c.GATEWAY_READY,
    c.MASTER_READY,
    c.SEGMENTS_MOUNTED,
)


def _readiness(before: Sequence[Condition], after: Sequence[Condition]) -> list[Story]:
    old, new = find(before, c.READY), find(after, c.READY)
    if new is None:
        return []
    if new.status == "True" and (old is None or old.status != "True"):
        return [Story("Ready", "every condition is true")]
    told = []
    for kind in _WORTH_A_WARNING:
        was, now = find(before, kind), find(after, kind)
        if was is not None and now is not None and was.status == "True" and now.status == "False":
            told.append(Story("NotReady", f"{kind}: {now.message}", False))
    return told


def _proof_words(proof: FlushProof | None) -> str:
    if proof is None:
        return "deleted by the store"
    return (
        f"{format_bytes(proof.bytes_before)} before; {format_bytes(proof.bytes_evicted)} evicted by the store after "
        f"the fence, {proof.objects_removed} objects ({format_bytes(proof.bytes_removed)}) removed; "
        f"the store answered {proof.delete_status} to the deletion; {proof.seconds:.1f} s"
    )
