"""The life of a tenant, as a pure state machine over the store's ledger.

A step is always written to the ledger before the call that it names is made, and what a call answered is folded in
by :func:`record`, so that an operator that dies anywhere goes on from the ledger and the master's own figures.

    Registered  -> wanted by a claim, or granted to a pod that still exists
    Fenced      -> Fencing: quota 1 byte; Removing: objects are removed; WaitingForUnfinishedPuts: only the
                   reservations of killed writers are left; Deleting: empty, the store is asked to delete it
    Flushed     -> the store has deleted it, which it refuses while anything is left: that is the proof
    Lost        -> the KVStore was made anew and knows nothing of it

A store that came back without a tenant (its master restarted) is given it again: open for a claim, closed for a flush.

A fenced tenant is never used again: a namespace that returns gets the next epoch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal

from moonpool_api.inference_service import FlushProof
from moonpool_api.kv_store import RetiredEpoch, TenantStatus
from moonpool_api.names import parse_tenant, tenant_name
from moonpool_api.quantity import format_bytes

from moonpool_operator.clients.mooncake import DeleteAnswer, MasterFigures, TenantFigures
from moonpool_operator.observe.model import Claim, Grant
from moonpool_operator.plan.quotas import Share, share_out

FENCING, REMOVING, DELETING = "Fencing", "Removing", "Deleting"
WAITING = "WaitingForUnfinishedPuts"
#: Tenants that are over and stay in the ledger, so that services can copy the proof.
MAX_HISTORY = 32


@dataclass(frozen=True)
class Call:
    """One call to the master about one tenant."""

    verb: Literal["register", "resize", "fence", "remove", "delete"]
    tenant: str
    quota: int = 0


@dataclass(frozen=True)
class TenantPlan:
    """The ledger to write, then the calls to make. ``waiting`` says per tenant what holds it up."""

    ledger: list[TenantStatus]
    retired: list[RetiredEpoch]
    calls: list[Call] = field(default_factory=list)
    waiting: dict[str, str] = field(default_factory=dict)
    #: Tenants that the master had lost and that are registered again.
    lost: tuple[str, ...] = ()


def plan_tenants(
    ledger: Sequence[TenantStatus],
    retired: Sequence[RetiredEpoch],
    claims: Sequence[Claim],
    grants: Iterable[Grant],
    tenants: Mapping[str, TenantFigures] | None,
    figures: MasterFigures | None,
    now: datetime,
) -> TenantPlan:
    """The next step of every tenant. ``tenants`` and ``figures`` are None while the master does not answer."""
    epochs = {entry.namespace: entry.epoch for entry in retired}
    entries = [*ledger, *_strangers(ledger, tenants or {})]
    claimed = _claimed(claims)
    holders: dict[str, str] = {}
    for grant in grants:
        holders.setdefault(grant.tenant, grant.pod)
    calls: list[Call] = []
    waiting: dict[str, str] = {}
    lost: list[str] = []
    planned: list[TenantStatus] = []
    for entry in entries:
        live = (tenants or {}).get(entry.name)
        holder = holders.get(entry.name, "")
        if entry.state == "Registered":
            wanted = claimed.get(entry.namespace, [])
            entry, call, wait = _open(entry, wanted, holder, live, tenants is not None, figures, now)
            if call and call.verb == "register":
                lost.append(entry.name)
        elif entry.state == "Fenced":
            entry, call, wait = _close(entry, holder, live, tenants is not None, now)
        else:
            call, wait = None, ""
        planned.append(entry)
        if call:
            calls.append(call)
        if wait:
            waiting[entry.name] = wait
        if entry.state != "Registered":
            epochs[entry.namespace] = max(entry.epoch, epochs.get(entry.namespace, -1))
    registered = {entry.namespace for entry in planned if entry.state == "Registered"}
    for namespace in sorted(claimed.keys() - registered):
        name = tenant_name(namespace, epochs.get(namespace, -1) + 1)
        if tenants is None:
            waiting[name] = "the master does not answer; its tenant is registered when it does"
        elif figures is None or figures.capacity <= 0:
            waiting[name] = "no memory is mounted; the tenant is registered when a store is there"
        else:
            calls.append(Call("register", name))
    if figures is not None and tenants is not None:
        calls = _with_quotas(calls, planned, claimed, tenants, figures.capacity)
    planned = _with_quota_of(planned, calls)
    kept_epochs = [RetiredEpoch(namespace=ns, epoch=epoch) for ns, epoch in sorted(epochs.items())]
    return TenantPlan(_cut(planned), kept_epochs, calls, waiting, tuple(lost))


def record(
    ledger: Sequence[TenantStatus],
    call: Call,
    answer: TenantFigures | DeleteAnswer | int,
    claims: Sequence[Claim],
    now: datetime,
    objects: int = 0,
) -> list[TenantStatus]:
    """The ledger after ``call`` was answered: figures of a tenant, the answer to a deletion, or objects removed."""
    entries = list(ledger)
    index = next((i for i, entry in enumerate(entries) if entry.name == call.tenant), None)
    if index is None:
        parsed = parse_tenant(call.tenant)
        if call.verb != "register" or parsed is None:
            return entries
        services = sorted({claim.service for claim in claims if claim.namespace == parsed[0]})
        entries.append(
            TenantStatus(
                name=call.tenant,
                namespace=parsed[0],
                epoch=parsed[1],
                service=services[0] if services else "",
                claimed_by=services,
                quota=call.quota,
            )
        )
        return entries
    entries[index] = _recorded(entries[index], call, answer, now, objects)
    return entries


def _recorded(
    entry: TenantStatus, call: Call, answer: TenantFigures | DeleteAnswer | int, now: datetime, objects: int
) -> TenantStatus:
    proof = entry.proof or FlushProof()
    if isinstance(answer, TenantFigures):
        if call.verb == "fence":
            # A put that ended between the reading and the fence counts as before the fence.
            before = max(proof.bytes_before, answer.charged)
            proof = proof.model_copy(update={"bytes_before": before})
            return entry.model_copy(update={"step": REMOVING, "bytes": answer.charged, "quota": 1, "proof": proof})
        return entry.model_copy(update={"quota": answer.quota, "bytes": answer.charged, "step": ""})
    if isinstance(answer, int):
        proof = proof.model_copy(update={"objects_removed": proof.objects_removed + answer})
        # A removal that finds nothing while bytes are charged: reservations of writers that died.
        return entry.model_copy(update={"proof": proof, "step": REMOVING if answer else WAITING})
    return _deleted(entry, proof, answer, now)


def _deleted(entry: TenantStatus, proof: FlushProof, answer: DeleteAnswer, now: datetime) -> TenantStatus:
    if answer.status == 409:
        return entry.model_copy(update={"step": WAITING})
    # 404: the deletion was recorded before it was made, so an operator that died in between finds it done.
    started = _parse(entry.fenced_at) or now
    proof = proof.model_copy(
        update={
            "bytes_evicted": max(0, proof.bytes_before - proof.bytes_removed),
            "objects_before": max(proof.objects_before, proof.objects_removed),
            "delete_status": answer.status,
            "delete_answer": answer.text,
            "seconds": round((now - started).total_seconds(), 3),
            "finished": _text(now),
        }
    )
    return entry.model_copy(update={"state": "Flushed", "step": "", "bytes": 0, "quota": 0, "proof": proof})


def _open(
    entry: TenantStatus,
    wanted: Sequence[Claim],
    holder: str,
    live: TenantFigures | None,
    answers: bool,
    figures: MasterFigures | None,
    now: datetime,
) -> tuple[TenantStatus, Call | None, str]:
    services = sorted({claim.service for claim in wanted})
    entry = entry.model_copy(update={"claimed_by": services, "bytes": live.charged if live else entry.bytes})
    if wanted:
        if answers and live is None:
            return entry, Call("register", entry.name), "the store came back without it; it is registered again"
        return entry.model_copy(update={"step": ""}), None, ""
    if holder:
        return entry.model_copy(update={"step": "InUse"}), None, f"pod {holder} was granted it"
    if not answers:
        return entry.model_copy(update={"step": "FencePending"}), None, "the master does not answer; the fence waits"
    if live is None:
        return _refence(entry.model_copy(update={"state": "Fenced", "fenced_at": _text(now)}))
    proof = FlushProof(bytes_before=live.charged)
    if figures is not None and figures.used == live.charged:
        # The master counts objects over all tenants only; this one is the only one that holds any.
        proof.objects_before = figures.keys
    fenced = entry.model_copy(update={"state": "Fenced", "step": FENCING, "fenced_at": _text(now), "proof": proof})
    return fenced, Call("fence", entry.name), ""


def _refence(entry: TenantStatus) -> tuple[TenantStatus, Call, str]:
    """The store came back without a tenant that is to go: registered again with one byte, it is closed from the first.

    Emptied and deleted like any other, it ends with the same proof: nothing of it is in the store, and nothing comes.
    """
    proof = (entry.proof or FlushProof()).model_copy(update={"lost": True})
    fenced = entry.model_copy(update={"step": FENCING, "bytes": 0, "proof": proof})
    return fenced, Call("fence", entry.name), "the store came back without it; it is registered again, closed"


def _close(
    entry: TenantStatus, holder: str, live: TenantFigures | None, answers: bool, now: datetime
) -> tuple[TenantStatus, Call | None, str]:
    entry = entry.model_copy(update={"claimed_by": []})
    if not answers:
        return entry, None, f"the master does not answer; {entry.step} waits"
    if live is None:
        if entry.step == DELETING:
            return entry, Call("delete", entry.name), ""
        return _refence(entry)
    if live.quota != 1:
        return entry.model_copy(update={"step": FENCING}), Call("fence", entry.name), ""
    entry = _count(entry, live.charged)
    if holder:
        return entry, None, f"pod {holder} was granted it"
    if live.charged == 0:
        return entry.model_copy(update={"step": DELETING}), Call("delete", entry.name), ""
    step = WAITING if entry.step == WAITING else REMOVING
    wait = f"{format_bytes(live.charged)} of unfinished puts are released by the store" if step == WAITING else ""
    return entry.model_copy(update={"step": step}), Call("remove", entry.name), wait


def _count(entry: TenantStatus, charged: int) -> TenantStatus:
    """Bytes that went since the last look: removed, if a removal was made; else the store evicted them itself."""
    proof = entry.proof or FlushProof()
    gone = max(0, entry.bytes - charged)
    if gone and entry.step == REMOVING and proof.objects_removed:
        proof = proof.model_copy(update={"bytes_removed": proof.bytes_removed + gone})
    return entry.model_copy(update={"bytes": charged, "proof": proof})


def _claimed(claims: Sequence[Claim]) -> dict[str, list[Claim]]:
    by_namespace: dict[str, list[Claim]] = {}
    for claim in claims:
        by_namespace.setdefault(claim.namespace, []).append(claim)
    return by_namespace


def _strangers(ledger: Sequence[TenantStatus], tenants: Mapping[str, TenantFigures]) -> list[TenantStatus]:
    """Tenants of our making that the ledger does not know: an operator died before it wrote, or a status was wiped."""
    known = {entry.name for entry in ledger}
    found = []
    for name, figures in tenants.items():
        parsed = parse_tenant(name)
        if parsed is None or name in known:
            continue
        fenced = figures.quota == 1
        found.append(
            TenantStatus(
                name=name,
                namespace=parsed[0],
                epoch=parsed[1],
                state="Fenced" if fenced else "Registered",
                step=REMOVING if fenced else "",
                quota=figures.quota,
                bytes=figures.charged,
                proof=FlushProof(bytes_before=figures.charged) if fenced else None,
            )
        )
    return found


def _with_quotas(
    calls: list[Call],
    ledger: Sequence[TenantStatus],
    claimed: Mapping[str, list[Claim]],
    tenants: Mapping[str, TenantFigures],
    capacity: int,
) -> list[Call]:
    """Registrations with their quotas, and the changes that make room for them: what shrinks comes first."""
    opening = {call.tenant for call in calls if call.verb == "register"}
    names = {entry.name for entry in ledger if entry.state == "Registered"} | opening
    shares = []
    for name in sorted(names):
        parsed = parse_tenant(name)
        wanted = claimed.get(parsed[0], []) if parsed else []
        stated = [claim.quota for claim in wanted if claim.quota is not None]
        charged = tenants[name].charged if name in tenants else 0
        draining = all(claim.draining for claim in wanted)
        shares.append(Share(name, max(stated) if stated else None, draining, charged))
    reserved = sum(tenants[e.name].charged for e in ledger if e.state == "Fenced" and e.name in tenants)
    quotas = share_out(capacity, shares, reserved)
    others = [call for call in calls if call.verb != "register"]
    changes = [
        Call("resize" if name in tenants else "register", name, quota)
        for name, quota in quotas.items()
        if name not in tenants or tenants[name].quota != quota
    ]
    changes.sort(key=lambda call: call.quota - (tenants[call.tenant].quota if call.tenant in tenants else 0))
    return others + changes


def _with_quota_of(ledger: list[TenantStatus], calls: Sequence[Call]) -> list[TenantStatus]:
    quotas = {call.tenant: call.quota for call in calls if call.verb in ("register", "resize")}
    return [entry.model_copy(update={"quota": quotas.get(entry.name, entry.quota)}) for entry in ledger]


def _cut(ledger: list[TenantStatus]) -> list[TenantStatus]:
    over = [entry for entry in ledger if entry.state in ("Flushed", "Lost")]
    dropped = {entry.name for entry in over[:-MAX_HISTORY]}
    return [entry for entry in ledger if entry.name not in dropped]


def _parse(text: str | None) -> datetime | None:
    return datetime.fromisoformat(text.replace("Z", "+00:00")) if text else None


def _text(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")
