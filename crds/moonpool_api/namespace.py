"""The KV namespace: SHA-256 over everything that changes the bytes of cached KV.

Two fleets may share blocks in the store if, and only if, their namespaces are equal. The worker computes the
namespace from what it loaded, the operator from what was asked for, both with :func:`namespace_hash`.
"""

from __future__ import annotations

import hashlib
import json

from pydantic import BaseModel, ConfigDict, Field

from moonpool_api.geometry import CacheGeometry


class RopeInputs(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    theta: float
    scaling: dict[str, float | int | str] = Field(default_factory=dict)


class NamespaceInputs(BaseModel):
    """Every input of the namespace, as a worker reports it. Log level, replicas and resources are not among them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    #: Raised when the engine changes what it writes for the same inputs.
    kv_format: int = 1
    architecture: str
    weights_digest: str = Field(pattern=r"^sha256:[0-9a-f]{64}$")
    weight_version: str
    dtype: str
    quantization: str = "none"
    attention_backend: str
    tensor_parallel: int = 1
    rope: RopeInputs
    geometry: CacheGeometry
    adapter: str = ""
    #: "<kubernetes namespace>/<service>" unless the service shares its tenant; then "".
    isolation: str = ""


def namespace_hash(inputs: NamespaceInputs) -> str:
    """64 hex digits: SHA-256 over the inputs as JSON with sorted keys and no white space."""
    text = json.dumps(inputs.model_dump(mode="json"), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def differing_inputs(left: NamespaceInputs, right: NamespaceInputs) -> dict[str, tuple[object, object]]:
    """Dotted names of the inputs that differ, each with both values; empty when the namespaces are equal."""
    a, b = _flatten(left.model_dump(mode="json")), _flatten(right.model_dump(mode="json"))
    return {key: (a.get(key), b.get(key)) for key in sorted(a.keys() | b.keys()) if a.get(key) != b.get(key)}


def _flatten(tree: dict[str, object], prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
