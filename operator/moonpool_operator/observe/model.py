"""The facts that the planner works on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from moonpool_api import names
from moonpool_api.inference_service import InferenceServiceSpec, InferenceServiceStatus
from moonpool_api.kv_store import KVStoreSpec, KVStoreStatus

from moonpool_operator.clients.kube import Object
from moonpool_operator.clients.mooncake import MasterFigures, TenantFigures
from moonpool_operator.clients.worker import WorkerReport


@dataclass(frozen=True)
class Pod:
    name: str
    uid: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    role: str = ""
    revision: str = ""
    ip: str = ""
    phase: str = "Pending"
    ready: bool = False
    #: The readiness gate's status; None while it was never written.
    gate: bool | None = None
    created: datetime | None = None
    #: When the pod has to be gone (grace included); None unless it is being deleted.
    deletion: datetime | None = None
    restarts: int = 0
    #: Why a container doesn't run, in the words of the container or the kubelet.
    trouble_reason: str = ""
    trouble: str = ""
    instance: str = ""

    @property
    def terminating(self) -> bool:
        return self.deletion is not None

    @property
    def finished(self) -> bool:
        return self.phase in ("Succeeded", "Failed")

    def lost(self, now: datetime, deadline: float) -> bool:
        """Should have been gone ``deadline`` seconds ago: its node does not answer."""
        return self.deletion is not None and (now - self.deletion).total_seconds() > deadline


@dataclass(frozen=True)
class Expectation:
    """What a revision's workers must have loaded, written on its pod template when the revision was made."""

    source: str = ""
    weight_version: str = ""
    dtype: str = "auto"
    quantization: str = "none"
    attention_backend: str = "auto"
    prefix_granularity: int = 16
    tensor_parallel: int = 1
    isolation: str = ""
    digest: str = ""
    #: The KVStore of the revision; "" without L3.
    store: str = ""


@dataclass(frozen=True)
class Revision:
    """A ReplicaSet of workers."""

    name: str
    revision: str
    replicas: int
    expectation: Expectation
    pinned_digest: str = ""
    created: datetime | None = None
    #: The ReplicaSet controller's own complaint (quota, admission), or "".
    trouble: str = ""


@dataclass(frozen=True)
class GatewayView:
    """A ready gateway pod and the addresses it routes to; None when it did not answer."""

    pod: str
    workers: frozenset[str] | None


@dataclass(frozen=True)
class StoreView:
    """A KVStore as a service sees it."""

    name: str
    exists: bool = False
    deleting: bool = False
    status: KVStoreStatus = field(default_factory=KVStoreStatus)


@dataclass(frozen=True)
class ServiceObservation:
    namespace: str
    name: str
    uid: str
    generation: int
    spec: InferenceServiceSpec
    status: InferenceServiceStatus
    resource_version: str = ""
    live_status: Mapping[str, object] = field(default_factory=dict)
    revisions: tuple[Revision, ...] = ()
    workers: tuple[Pod, ...] = ()
    gateways: tuple[Pod, ...] = ()
    reports: Mapping[str, WorkerReport] = field(default_factory=dict)
    views: tuple[GatewayView, ...] = ()
    stores: Mapping[str, StoreView] = field(default_factory=dict)
    #: Live children by (kind, name), to apply only what differs.
    children: Mapping[tuple[str, str], Object] = field(default_factory=dict)


@dataclass(frozen=True)
class Claim:
    """A service's need of a tenant of one store."""

    service: str
    namespace: str
    quota: int | None = None
    draining: bool = False


@dataclass(frozen=True)
class Grant:
    """A pod that was granted a tenant and may still use it."""

    pod: str
    tenant: str


@dataclass(frozen=True)
class StoreObservation:
    namespace: str
    name: str
    uid: str
    generation: int
    spec: KVStoreSpec
    status: KVStoreStatus
    resource_version: str = ""
    live_status: Mapping[str, object] = field(default_factory=dict)
    deleting: bool = False
    finalizers: tuple[str, ...] = ()
    namespace_terminating: bool = False
    master_pods: tuple[Pod, ...] = ()
    store_pods: tuple[Pod, ...] = ()
    services: tuple[str, ...] = ()
    claims: tuple[Claim, ...] = ()
    grants: tuple[Grant, ...] = ()
    #: None while the master does not answer; then ``master_error`` says how.
    figures: MasterFigures | None = None
    tenants: Mapping[str, TenantFigures] | None = None
    master_error: str = ""
    children: Mapping[tuple[str, str], Object] = field(default_factory=dict)

    @property
    def finalized(self) -> bool:
        return names.FINALIZER in self.finalizers
