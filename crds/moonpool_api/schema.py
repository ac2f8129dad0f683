"""CRD manifests generated from the pydantic models.

Pydantic emits JSON schema with ``$ref``, ``anyOf`` for optional fields and ``const``; Kubernetes wants a structural
schema without any of them. :func:`structural` rewrites the one into the other, the CEL rules are added by path.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from pydantic import BaseModel

from moonpool_api import names
from moonpool_api.inference_service import InferenceServiceSpec, InferenceServiceStatus
from moonpool_api.kv_store import KVStoreSpec, KVStoreStatus

Schema = dict[str, Any]

_DROPPED = ("title", "discriminator", "additionalProperties")
_ONE_SOURCE = (
    "(has(self.persistentVolumeClaim) ? 1 : 0) + (has(self.image) ? 1 : 0) + "
    "(has(self.huggingFace) ? 1 : 0) + (has(self.hostPath) ? 1 : 0) == 1"
)
#: CEL rules by kind and dotted path below spec.
_RULES: dict[str, dict[str, list[dict[str, str]]]] = {
    names.INFERENCE_SERVICE: {
        "model.source": [
            {
                "rule": _ONE_SOURCE,
                "message": "give exactly one of persistentVolumeClaim, image, huggingFace, hostPath",
            },
        ],
        "cache.l2": [
            {
                "rule": "!(has(self.size) && has(self.ratio))",
                "message": "give size or ratio, not both",
            },
            {
                "rule": "!(has(self.disabled) && self.disabled && (has(self.size) || has(self.ratio)))",
                "message": "a disabled tier takes neither size nor ratio",
            },
        ],
        "cache.l1.size": [
            {"rule": "quantity(self).isGreaterThan(quantity('1Mi'))", "message": "must be over 1Mi"},
        ],
        "rollout": [
            {
                "rule": "self.maxSurge > 0 || self.maxUnavailable > 0",
                "message": "maxSurge and maxUnavailable may not both be 0: no pod could ever be replaced",
            },
        ],
    },
    names.KV_STORE: {
        "stores.segmentSize": [
            {"rule": "quantity(self).isGreaterThan(quantity('15Mi'))", "message": "must be at least 16Mi"},
        ],
    },
}

_SERVICE_COLUMNS = [
    ("Ready", "string", '.status.conditions[?(@.type=="Ready")].status', 0),
    ("Reason", "string", '.status.conditions[?(@.type=="Ready")].reason', 0),
    ("Replicas", "string", ".status.readyReplicas", 0),
    ("Desired", "integer", ".spec.replicas", 0),
    ("Version", "string", ".spec.weightVersion", 0),
    ("Namespace", "string", ".status.activeNamespace", 1),
    ("Rollout", "string", ".status.rollout.step", 0),
    ("Flushed", "string", '.status.conditions[?(@.type=="L3Flushed")].status', 0),
    ("Age", "date", ".metadata.creationTimestamp", 0),
]
_STORE_COLUMNS = [
    ("Ready", "string", '.status.conditions[?(@.type=="Ready")].status', 0),
    ("Reason", "string", '.status.conditions[?(@.type=="Ready")].reason', 0),
    ("Segments", "integer", ".status.segments", 0),
    ("Capacity", "integer", ".status.capacity", 1),
    ("Used", "integer", ".status.used", 0),
    ("Keys", "integer", ".status.keys", 0),
    ("Master", "string", ".status.master", 1),
    ("Age", "date", ".metadata.creationTimestamp", 0),
]


def structural(schema: Schema, definitions: Schema | None = None) -> Schema:
    """``schema`` (JSON schema 2020-12, as pydantic writes it) as a Kubernetes structural schema."""
    definitions = schema.get("$defs", {}) if definitions is None else definitions
    if "$ref" in schema:
        target = deepcopy(definitions[schema["$ref"].rsplit("/", 1)[1]])
        siblings = {key: value for key, value in schema.items() if key != "$ref"}
        return structural(target | siblings, definitions)
    if "anyOf" in schema:
        kinds = [option for option in schema["anyOf"] if option.get("type") != "null"]
        if len(kinds) != 1:
            raise ValueError(f"only optional fields may be unions: {schema}")
        rest = {key: value for key, value in schema.items() if key not in ("anyOf", "default")}
        if schema.get("default") is not None:
            rest["default"] = schema["default"]
        return structural(kinds[0] | rest, definitions)

    out = {key: value for key, value in schema.items() if key not in (*_DROPPED, "$defs")}
    if "const" in out:
        out["enum"] = [out.pop("const")]
    # Kubernetes takes the OpenAPI v3.0 form of exclusive bounds.
    for exclusive, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if exclusive in out:
            out[bound] = out[exclusive]
            out[exclusive] = True
    if "properties" in out:
        out["properties"] = {name: structural(value, definitions) for name, value in out["properties"].items()}
    if "items" in out:
        out["items"] = structural(out["items"], definitions)
    if isinstance(schema.get("additionalProperties"), dict):
        out["additionalProperties"] = structural(schema["additionalProperties"], definitions)
    return out


def _at(schema: Schema, path: str) -> Schema:
    for name in filter(None, path.split(".")):
        schema = schema["properties"][name]
    return schema


def _root(spec: type[BaseModel], status: type[BaseModel], kind: str) -> Schema:
    spec_schema = structural(spec.model_json_schema(by_alias=True))
    for path, rules in _RULES[kind].items():
        _at(spec_schema, path)["x-kubernetes-validations"] = rules
    status_schema = structural(status.model_json_schema(by_alias=True))
    # The status has one writer, the operator; what it requires may change between versions.
    _forget_required(status_schema)
    return {
        "type": "object",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": spec_schema,
            "status": status_schema,
        },
    }


def _forget_required(schema: Schema) -> None:
    schema.pop("required", None)
    schema.pop("default", None)
    for child in schema.get("properties", {}).values():
        _forget_required(child)
    if isinstance(schema.get("items"), dict):
        _forget_required(schema["items"])


def _columns(columns: list[tuple[str, str, str, int]]) -> list[Schema]:
    return [
        {"name": name, "type": kind, "jsonPath": path, **({"priority": priority} if priority else {})}
        for name, kind, path, priority in columns
    ]


def _crd(
    kind: str,
    plural: str,
    short: list[str],
    root: Schema,
    columns: list[Schema],
    subresources: Schema,
) -> Schema:
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{names.GROUP}"},
        "spec": {
            "group": names.GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": kind,
                "listKind": f"{kind}List",
                "plural": plural,
                "singular": kind.lower(),
                "shortNames": short,
                "categories": ["moonpool"],
            },
            "versions": [
                {
                    "name": names.VERSION,
                    "served": True,
                    "storage": True,
                    "schema": {"openAPIV3Schema": root},
                    "subresources": subresources,
                    "additionalPrinterColumns": columns,
                }
            ],
        },
    }


def custom_resource_definitions() -> dict[str, Schema]:
    """File name to manifest, for both custom resources."""
    scale = {
        "specReplicasPath": ".spec.replicas",
        "statusReplicasPath": ".status.replicas",
        "labelSelectorPath": ".status.selector",
    }
    service = _crd(
        names.INFERENCE_SERVICE,
        names.INFERENCE_SERVICES,
        ["isvc"],
        _root(InferenceServiceSpec, InferenceServiceStatus, names.INFERENCE_SERVICE),
        _columns(_SERVICE_COLUMNS),
        {"status": {}, "scale": scale},
    )
    store = _crd(
        names.KV_STORE,
        names.KV_STORES,
        ["kvs"],
        _root(KVStoreSpec, KVStoreStatus, names.KV_STORE),
        _columns(_STORE_COLUMNS),
        {"status": {}},
    )
    return {"inferenceservices.yaml": service, "kvstores.yaml": store}
