"""What all children share: metadata, owner, and the restricted security contexts."""

from __future__ import annotations

from moonpool_api import names
from moonpool_api.inference_service import Resources

from moonpool_operator.clients.kube import Object

UID = 65532


def metadata(name: str, namespace: str, labels: dict[str, str], owner: Object | None) -> Object:
    made: Object = {
        "name": name,
        "namespace": namespace,
        "labels": {**labels, names.LABEL_MANAGED_BY: names.MANAGED_BY},
    }
    if owner is not None:
        made["ownerReferences"] = [owner]
    return made


def owner_reference(kind: str, name: str, uid: str) -> Object:
    return {
        "apiVersion": names.API_VERSION,
        "kind": kind,
        "name": name,
        "uid": uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }


def pod_security() -> Object:
    return {
        "runAsNonRoot": True,
        "runAsUser": UID,
        "runAsGroup": UID,
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def container_security() -> Object:
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def resources(
    wanted: Resources, default_requests: dict[str, str], default_limits: dict[str, str] | None = None
) -> Object:
    """``wanted``, with defaults for each request or limit that is not given."""
    limits = {**(default_limits or {}), **wanted.limits.to_api()}
    requests = {**{key: limits.get(key, value) for key, value in default_requests.items()}, **wanted.requests.to_api()}
    made: Object = {"requests": requests}
    if limits:
        made["limits"] = limits
    return made


def field_env(name: str, path: str) -> Object:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def env(name: str, value: str) -> Object:
    return {"name": name, "value": value}


TMP_VOLUME: Object = {"name": "tmp", "emptyDir": {}}
TMP_MOUNT: Object = {"name": "tmp", "mountPath": "/tmp"}
