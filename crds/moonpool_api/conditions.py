"""Conditions: what is true of an object now, why, and since when (the Kubernetes API convention)."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Literal

from moonpool_api.model import ApiModel

Status = Literal["True", "False", "Unknown"]


class Condition(ApiModel):
    type: str
    status: Status
    reason: str
    message: str = ""
    observed_generation: int = 0
    last_transition_time: str = ""


def now_rfc3339() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def merge_conditions(old: Iterable[Condition], new: Iterable[Condition], now: str) -> list[Condition]:
    """``new``, each keeping the old transition time where its status did not change. Order is that of ``new``."""
    before = {condition.type: condition for condition in old}
    merged = []
    for condition in new:
        last = before.get(condition.type)
        since = last.last_transition_time if last and last.status == condition.status else now
        merged.append(condition.model_copy(update={"last_transition_time": since or now}))
    return merged


def find(conditions: Iterable[Condition], kind: str) -> Condition | None:
    return next((condition for condition in conditions if condition.type == kind), None)
