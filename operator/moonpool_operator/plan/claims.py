"""Claims: which tenants of a store this service needs, and what became of those it no longer needs.

Active belongs to the current revision. Draining is an old one whose pods exist or whose bake runs, so that an edit
back finds its tenant warm. A claim whose bake is over is Released: from then on the store's ledger moves it on to
Fenced, Flushed or Lost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from moonpool_api.inference_service import KVNamespaceStatus
from moonpool_api.kv_store import TenantStatus

from moonpool_operator.observe.model import StoreView

WANTED = ("Active", "Draining")
#: Claims that are over and stay in status, to tell what happened.
MAX_HISTORY = 5


@dataclass(frozen=True)
class NeededNamespace:
    """A namespace that the workers of a revision have reported and use."""

    hash: str
    store: str
    revision: str
    weight_version: str
    current: bool


@dataclass(frozen=True)
class BakePolicy:
    """``complete``: the roll is over, so a bake may start. ``paused``: nothing is given up."""

    flush: str
    seconds: float
    complete: bool
    paused: bool


def plan_claims(
    before: Sequence[KVNamespaceStatus],
    needed: Sequence[NeededNamespace],
    stores: Mapping[str, StoreView],
    policy: BakePolicy,
    now: datetime,
) -> list[KVNamespaceStatus]:
    """The next claims, oldest first; history is cut to the last few."""
    wanted = {(need.hash, need.store): need for need in sorted(needed, key=lambda need: need.current)}
    claims: list[KVNamespaceStatus] = []
    for claim in before:
        key = (claim.hash, claim.store)
        if key in wanted and _can_want(claim, stores):
            claims.append(_want(claim, wanted.pop(key), stores, now))
        else:
            claims.append(_leave(claim, stores, policy, now))
    for need in wanted.values():
        fresh = KVNamespaceStatus(hash=need.hash, store=need.store, state="Active", since=_text(now))
        claims.append(_want(fresh, need, stores, now))
    return _cut(claims)


def _can_want(claim: KVNamespaceStatus, stores: Mapping[str, StoreView]) -> bool:
    """A claim comes back only while its tenant was not fenced; afterwards the need is a new claim, with a new epoch."""
    if claim.state in WANTED:
        return True
    entry = ledger_entry(claim, stores)
    return claim.state == "Released" and (entry is None or entry.state == "Registered")


def _want(
    claim: KVNamespaceStatus, need: NeededNamespace, stores: Mapping[str, StoreView], now: datetime
) -> KVNamespaceStatus:
    state = "Active" if need.current else "Draining"
    return claim.model_copy(
        update={
            "tenant": registered_tenant(claim.hash, claim.store, stores) or claim.tenant,
            "revision": need.revision,
            "weight_version": need.weight_version,
            "state": state,
            "since": claim.since if claim.state == state and claim.since else _text(now),
            "bake_until": None,
        }
    )


def _leave(
    claim: KVNamespaceStatus, stores: Mapping[str, StoreView], policy: BakePolicy, now: datetime
) -> KVNamespaceStatus:
    if claim.state in WANTED:
        return _bake(claim, stores, policy, now)
    return _follow_ledger(claim, stores, now)


def _bake(
    claim: KVNamespaceStatus, stores: Mapping[str, StoreView], policy: BakePolicy, now: datetime
) -> KVNamespaceStatus:
    tenant = registered_tenant(claim.hash, claim.store, stores) or claim.tenant
    since = claim.since if claim.state == "Draining" else _text(now)
    kept = claim.model_copy(update={"state": "Draining", "since": since, "tenant": tenant})
    if policy.flush == "Keep":
        return kept.model_copy(update={"bake_until": None})
    until = claim.bake_until
    # Immediately also ends a bake that runs; an edit of the bake's length does not move its end.
    if policy.complete and (until is None or policy.flush == "Immediately"):
        seconds = 0.0 if policy.flush == "Immediately" else policy.seconds
        ends = _text(now + timedelta(seconds=seconds), round_up=True)
        until = min(until or ends, ends)
        kept = kept.model_copy(update={"bake_until": until})
    if until is None or policy.paused or now < datetime.fromisoformat(until.replace("Z", "+00:00")):
        return kept
    released = kept.model_copy(update={"state": "Released", "since": _text(now)})
    return _follow_ledger(released, stores, now)


def _follow_ledger(claim: KVNamespaceStatus, stores: Mapping[str, StoreView], now: datetime) -> KVNamespaceStatus:
    if claim.state in ("Flushed", "Lost"):
        return claim
    store = stores.get(claim.store)
    if store is not None and not store.exists:
        # Its memory went with it.
        return claim.model_copy(update={"state": "Lost", "since": _text(now)})
    entry = ledger_entry(claim, stores)
    if entry is None or entry.state == "Registered":
        return claim
    changed = entry.state != claim.state
    return claim.model_copy(
        update={
            "state": entry.state,
            "since": _text(now) if changed else claim.since,
            "proof": entry.proof if entry.state == "Flushed" else None,
        }
    )


def ledger_entry(claim: KVNamespaceStatus, stores: Mapping[str, StoreView]) -> TenantStatus | None:
    store = stores.get(claim.store)
    tenants = store.status.tenants if store else []
    return next((tenant for tenant in tenants if tenant.name == claim.tenant), None)


def registered_tenant(namespace: str, store: str, stores: Mapping[str, StoreView]) -> str:
    """The namespace's open tenant in the store's ledger, or ""."""
    view = stores.get(store)
    tenants = view.status.tenants if view else []
    return next((t.name for t in tenants if t.namespace == namespace and t.state == "Registered"), "")


def pending(claim: KVNamespaceStatus, service: str, stores: Mapping[str, StoreView]) -> bool:
    """Is this claim still to be flushed? Not when its tenant goes on living for another service."""
    if claim.state == "Fenced":
        return True
    if claim.state != "Released" or not claim.tenant:
        return False
    entry = ledger_entry(claim, stores)
    shared = entry is not None and entry.state == "Registered" and any(c != service for c in entry.claimed_by)
    return not shared


def _cut(claims: list[KVNamespaceStatus]) -> list[KVNamespaceStatus]:
    over = [claim for claim in claims if claim.state in ("Flushed", "Lost")]
    # A released claim that never had a tenant has nothing to flush and nothing to tell.
    empty = [claim for claim in claims if claim.state == "Released" and not claim.tenant]
    dropped = {id(claim) for claim in [*over[:-MAX_HISTORY], *empty]}
    return [claim for claim in claims if id(claim) not in dropped]


def _text(moment: datetime, round_up: bool = False) -> str:
    if round_up and moment.microsecond:
        moment = moment.replace(microsecond=0) + timedelta(seconds=1)
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")
