"""The custom resources of the scenarios: those of the demo, with edits by dotted path."""

from __future__ import annotations

import copy
from pathlib import Path

import yaml

DEMO = Path(__file__).parent / "demo"


def _load(name: str, edits: dict[str, object]) -> dict:
    manifest = copy.deepcopy(yaml.safe_load((DEMO / name).read_text()))
    for path, value in edits.items():
        node = manifest["spec"]
        *parents, leaf = path.split(".")
        for parent in parents:
            node = node.setdefault(parent, {})
        if value is None:
            node.pop(leaf, None)
        else:
            node[leaf] = value
    return manifest


def inference_service(**edits: object) -> dict:
    """``inference_service(**{"rollout.bake": "5s"})``; None removes a field."""
    return _load("inferenceservice.yaml", edits)


def kv_store(**edits: object) -> dict:
    return _load("kvstore.yaml", edits)


def restricted_pod(name: str, image: str, command: list[str]) -> dict:
    """A pod that the Pod Security level ``restricted`` lets in, and that runs once."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 1,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": 65532,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [
                {
                    "name": "main",
                    "image": image,
                    "imagePullPolicy": "IfNotPresent",
                    "command": command,
                    "env": [{"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
                    "securityContext": {
                        "allowPrivilegeEscalation": False,
                        "readOnlyRootFilesystem": True,
                        "capabilities": {"drop": ["ALL"]},
                    },
                }
            ],
        },
    }
