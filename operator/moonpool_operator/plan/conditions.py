"""The condition trees. Ready is computed from its children and carries the reason of the first that is not true."""

from __future__ import annotations

from collections.abc import Sequence

from moonpool_api.conditions import Condition, Status

WORKERS_READY = "WorkersReady"
NAMESPACE_VERIFIED = "NamespaceVerified"
CACHE_READY = "CacheReady"
GATEWAY_READY = "GatewayReady"
ROLLOUT_COMPLETE = "RolloutComplete"
L3_FLUSHED = "L3Flushed"
READY = "Ready"

MASTER_READY = "MasterReady"
SEGMENTS_MOUNTED = "SegmentsMounted"
IN_USE = "InUse"

#: A condition that may be unknown without its object being less than ready (flush: Keep, or a store that was lost).
_MAY_BE_UNKNOWN = {L3_FLUSHED}
_MAX_MESSAGE = 1024


def condition(kind: str, status: bool | Status, reason: str, message: str = "") -> Condition:
    """A condition; booleans become "True" and "False", messages are cut to a length that people read."""
    text: Status = status if isinstance(status, str) else ("True" if status else "False")
    return Condition(type=kind, status=text, reason=reason, message=message[:_MAX_MESSAGE])


def ready(children: Sequence[Condition]) -> Condition:
    """The parent of ``children``: False with the first false child's words, else Unknown with the first unknown's."""
    for status in ("False", "Unknown"):
        for child in children:
            if child.status == status and not (status == "Unknown" and child.type in _MAY_BE_UNKNOWN):
                message = f"{child.type}: {child.message}" if child.message else f"{child.type} is {status.lower()}"
                return condition(READY, status, child.reason, message)
    return condition(READY, True, READY, "")


def tree(children: Sequence[Condition], generation: int) -> list[Condition]:
    """Ready first, then its children, all of one observed generation."""
    every = [ready(children), *children]
    return [each.model_copy(update={"observed_generation": generation}) for each in every]
