"""Where a rollout is, in words: the step is read off the facts, never remembered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from moonpool_api.inference_service import KVNamespaceStatus, RolloutStatus

from moonpool_operator.observe.model import Pod, StoreView
from moonpool_operator.plan.claims import ledger_entry, pending
from moonpool_operator.plan.fleet import Fleet, serves
from moonpool_operator.plan.rollout import RevisionCount
from moonpool_operator.plan.verify import Verdict

PAUSED, STARTING, VERIFYING, ROUTING = "Paused", "Starting", "Verifying", "Routing"
DRAINING, BAKING, FLUSHING, COMPLETE = "Draining", "Baking", "Flushing", "Complete"


@dataclass(frozen=True)
class Situation:
    """All that a step is told from."""

    service: str
    fleet: Fleet
    new: RevisionCount
    desired: int
    done: bool
    paused: bool
    flush: str
    verdicts: Mapping[str, Verdict]
    claims: Sequence[KVNamespaceStatus]
    stores: Mapping[str, StoreView]


def step_of(now: Situation) -> tuple[str, str]:
    """(step, message for people)"""
    if now.done:
        return _after(now)
    if now.paused:
        return PAUSED, "spec.paused holds the rollout"
    served = f"{now.new.available} of {now.desired} new workers serve"
    leaving = [pod for pod in now.fleet.leaving if pod.revision != now.new.name]
    if leaving:
        return DRAINING, f"{served}; draining: {', '.join(pod.name for pod in leaving)}"
    for pod in now.fleet.of(now.new.name):
        step, why = _unavailable(pod, now)
        if step:
            return step, f"{served}; {why}"
    return STARTING, served


def _unavailable(pod: Pod, now: Situation) -> tuple[str, str]:
    verdict = now.verdicts.get(pod.name)
    if verdict is not None and verdict.refused:
        return VERIFYING, f"refused: {verdict.message}"
    if pod.trouble:
        return STARTING, f"{pod.name}: {pod.trouble}"
    if verdict is None:
        return STARTING, f"{pod.name} is loading"
    if not serves(pod):
        return VERIFYING, f"{pod.name} is verified and getting ready"
    if pod.name not in now.fleet.listed:
        return ROUTING, f"{pod.name} is ready; not every gateway routes to it yet"
    return "", ""


def _after(now: Situation) -> tuple[str, str]:
    baking = [claim for claim in now.claims if claim.state == "Draining"]
    if baking and now.flush != "Keep":
        until = max((claim.bake_until or "" for claim in baking), default="")
        return BAKING, f"the old KV is kept until {until or 'the next look'}; an edit back finds it warm"
    waiting = [claim for claim in now.claims if pending(claim, now.service, now.stores)]
    if waiting:
        return FLUSHING, "; ".join(flush_words(claim, now.stores) for claim in waiting)
    return COMPLETE, f"revision {now.new.name} serves, workers: {now.desired}"


def flush_words(claim: KVNamespaceStatus, stores: Mapping[str, StoreView]) -> str:
    """How far the store's ledger is with a tenant that has to go."""
    store, entry = stores.get(claim.store), ledger_entry(claim, stores)
    if store is None or not store.exists:
        return f"KVStore {claim.store} is gone"
    if entry is None:
        return f"KVStore {claim.store} has not taken {claim.tenant or claim.hash} up yet"
    return f"{claim.tenant}: {entry.state}{f' ({entry.step})' if entry.step else ''}"


def rollout_status(
    before: RolloutStatus | None, goal: str, situation: Situation, changed: bool, now: datetime
) -> RolloutStatus:
    """The rollout to ``goal``; a new goal is a new rollout. ``changed``: a worker came or went since the last look."""
    text = now.strftime("%Y-%m-%dT%H:%M:%SZ")
    step, message = step_of(situation)
    bakes = [claim.bake_until for claim in situation.claims if claim.state == "Draining" and claim.bake_until]
    if before is None or before.to_revision != goal:
        base = RolloutStatus(
            from_revision=before.to_revision if before else "", to_revision=goal, started=text, progressed=text
        )
    else:
        base = before.model_copy(update={"progressed": text} if changed else {})
    return base.model_copy(
        update={"step": step, "message": message, "bake_until": max(bakes) if step == BAKING and bakes else None}
    )
