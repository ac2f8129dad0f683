"""Names that more than one program uses: API group, labels, annotations, ports, child objects.

Kubernetes label values and most object names hold at most 63 characters, so every child name is cut to fit and
keeps a digest of what was cut.
"""

from __future__ import annotations

import hashlib

GROUP = "moonpool.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
INFERENCE_SERVICE = "InferenceService"
KV_STORE = "KVStore"
INFERENCE_SERVICES = "inferenceservices"
KV_STORES = "kvstores"

FIELD_MANAGER = "moonpool-operator"
FINALIZER = f"{GROUP}/tenants"

# Labels of children.
LABEL_SERVICE = f"{GROUP}/service"
LABEL_STORE = f"{GROUP}/store"
LABEL_ROLE = f"{GROUP}/role"
LABEL_REVISION = f"{GROUP}/revision"
LABEL_MANAGED_BY = "app.kubernetes.io/managed-by"
MANAGED_BY = "moonpool"

ROLE_WORKER = "worker"
ROLE_GATEWAY = "gateway"
ROLE_MASTER = "kv-master"
ROLE_STORE = "kv-store"

# Written by the operator on a worker pod, read by the worker through a downward-API volume.
ANNOTATION_VERIFIED_NAMESPACE = f"{GROUP}/verified-namespace"
ANNOTATION_GRANTED_TENANT = f"{GROUP}/granted-tenant"
ANNOTATION_GRANTED_MASTER = f"{GROUP}/granted-master"
# Written by the operator on a revision's ReplicaSet: the first verified weights digest of that revision.
ANNOTATION_PINNED_DIGEST = f"{GROUP}/pinned-weights-digest"

READINESS_GATE = f"{GROUP}/namespace-verified"

PORT_WORKER = 8000
PORT_GATEWAY = 8080
PORT_GATEWAY_METRICS = 29000
PORT_MASTER_RPC = 50051
PORT_MASTER_HTTP = 9003
PORT_STORE_REST = 8088
#: Mooncake's data plane takes random ports in this range.
STORE_DATA_PORTS = (15000, 17000)

PODINFO_DIR = "/etc/moonpool/podinfo"
MODEL_DIR = "/model"

MAX_NAME = 63


def child_name(*parts: str, limit: int = MAX_NAME) -> str:
    """Join ``parts`` with dashes; a result over ``limit`` characters is cut and ends in eight digits of its digest."""
    name = "-".join(parts)
    if len(name) <= limit:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    return f"{name[: limit - 9].rstrip('-')}-{digest}"


def gateway_name(service: str) -> str:
    return child_name(service, "gateway")


def revision_name(service: str, revision: str) -> str:
    # Pods add a dash and five characters to their ReplicaSet's name.
    return child_name(service, revision, limit=MAX_NAME - 6)


def master_name(store: str) -> str:
    return child_name(store, "master")


def store_set_name(store: str) -> str:
    # StatefulSet pods carry a controller-revision-hash label of the name, a dash and ten characters.
    return child_name(store, "store", limit=MAX_NAME - 11)


def tenant_name(namespace_hash: str, epoch: int) -> str:
    """Mooncake's tenant of a KV namespace.

    The epoch rises each time a namespace comes back after its tenant was fenced; a fenced tenant is never used again.
    """
    if epoch < 0:
        raise ValueError(f"epoch must not be negative: {epoch}")
    return f"mp1-{namespace_hash}-{epoch}"


def parse_tenant(tenant: str) -> tuple[str, int] | None:
    """``(namespace hash, epoch)`` of a tenant that Moonpool made, or None for somebody else's tenant."""
    prefix, _, rest = tenant.partition("-")
    namespace_hash, _, epoch = rest.rpartition("-")
    if prefix != "mp1" or len(namespace_hash) != 64 or not epoch.isdigit():
        return None
    return namespace_hash, int(epoch)
