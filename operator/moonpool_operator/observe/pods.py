"""Pods and ReplicaSets as the planner sees them."""

from __future__ import annotations

import json
from dataclasses import fields
from datetime import datetime
from typing import Any

from moonpool_api import names

from moonpool_operator.clients.kube import Object
from moonpool_operator.observe.model import Expectation, Pod, Revision

#: On the pod template: what its workers must report, as JSON.
ANNOTATION_EXPECTED = f"{names.GROUP}/expected"


def parse_time(text: str | None) -> datetime | None:
    return datetime.fromisoformat(text.replace("Z", "+00:00")) if text else None


def parse_pod(pod: Object) -> Pod:
    metadata, status = pod["metadata"], pod.get("status", {})
    labels = metadata.get("labels") or {}
    conditions = {c["type"]: c["status"] == "True" for c in status.get("conditions", [])}
    containers = [*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])]
    reason, message = _trouble(containers, status)
    restarts = sum(c.get("restartCount", 0) for c in status.get("containerStatuses", []))
    return Pod(
        name=metadata["name"],
        uid=metadata.get("uid", ""),
        labels=labels,
        annotations=metadata.get("annotations") or {},
        role=labels.get(names.LABEL_ROLE, ""),
        revision=labels.get(names.LABEL_REVISION, ""),
        ip=status.get("podIP", ""),
        phase=status.get("phase", "Pending"),
        ready=conditions.get("Ready", False),
        gate=conditions.get(names.READINESS_GATE),
        created=parse_time(metadata.get("creationTimestamp")),
        deletion=parse_time(metadata.get("deletionTimestamp")),
        restarts=restarts,
        trouble_reason=reason,
        trouble=message,
        instance=f"{metadata.get('uid', '')}/{restarts}",
    )


def _trouble(containers: list[dict[str, Any]], status: dict[str, Any]) -> tuple[str, str]:
    """Why the pod's containers don't run: the program's last words first, then the kubelet's, then the scheduler's."""
    for container in containers:
        state, last = container.get("state", {}), container.get("lastState", {})
        waiting = state.get("waiting") or {}
        ended = state.get("terminated") or last.get("terminated") or {}
        running = "running" in state
        if ended.get("exitCode") and not (running and container.get("ready")):
            words = (ended.get("message") or "").strip() or f"exit code {ended['exitCode']}"
            return waiting.get("reason") or ended.get("reason") or "Error", f"{container['name']}: {words}"
        if waiting.get("reason") not in (None, "ContainerCreating", "PodInitializing"):
            return waiting["reason"], f"{container['name']}: {waiting.get('message', waiting['reason'])}"
    for condition in status.get("conditions", []):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return condition.get("reason", "Unschedulable"), condition.get("message", "")
    if status.get("phase") == "Failed":
        return status.get("reason", "Failed"), status.get("message", "")
    return "", ""


def expectation_from_json(text: str) -> Expectation:
    """Tolerant of fields of another version of the operator."""
    try:
        data = json.loads(text or "{}")
    except ValueError:
        data = {}
    known = {f.name for f in fields(Expectation)}
    return Expectation(**{key: value for key, value in data.items() if key in known})


def parse_replica_set(replica_set: Object) -> Revision:
    metadata, spec = replica_set["metadata"], replica_set["spec"]
    template = spec.get("template", {}).get("metadata", {})
    failures = [
        c.get("message", "")
        for c in replica_set.get("status", {}).get("conditions", [])
        if c["type"] == "ReplicaFailure" and c["status"] == "True"
    ]
    return Revision(
        name=metadata["name"],
        revision=(metadata.get("labels") or {}).get(names.LABEL_REVISION, ""),
        replicas=spec.get("replicas", 1),
        expectation=expectation_from_json((template.get("annotations") or {}).get(ANNOTATION_EXPECTED, "")),
        pinned_digest=(metadata.get("annotations") or {}).get(names.ANNOTATION_PINNED_DIGEST, ""),
        created=parse_time(metadata.get("creationTimestamp")),
        trouble=failures[0] if failures else "",
    )
