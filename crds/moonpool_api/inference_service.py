"""InferenceService: a model, its workers, its cache tiers and its gateway."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from moonpool_api.conditions import Condition
from moonpool_api.model import ApiModel
from moonpool_api.quantity import DURATION_PATTERN, QUANTITY_PATTERN

Quantity = Annotated[str, Field(pattern=QUANTITY_PATTERN, max_length=32)]
Duration = Annotated[str, Field(pattern=DURATION_PATTERN, max_length=32)]
Digest = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]


class ClaimSource(ApiModel):
    claim_name: str = Field(min_length=1, max_length=253)
    path: str = Field(default="", max_length=1024, description="File or folder inside the volume.")


class ImageSource(ApiModel):
    """An image that carries the weights; an init container copies them into the pod."""

    reference: str = Field(min_length=1, max_length=512)
    path: str = Field(default="/weights", max_length=1024, description="File or folder inside the image.")


class HuggingFaceSource(ApiModel):
    repo: str = Field(min_length=1, max_length=256)
    revision: str = Field(default="main", max_length=128)
    token_secret_name: str | None = Field(default=None, max_length=253)


class HostPathSource(ApiModel):
    path: str = Field(min_length=1, max_length=1024, pattern=r"^/")


class ModelSource(ApiModel):
    """Where the weights come from: exactly one of the four."""

    persistent_volume_claim: ClaimSource | None = None
    image: ImageSource | None = None
    hugging_face: HuggingFaceSource | None = None
    host_path: HostPathSource | None = None


class Model(ApiModel):
    source: ModelSource
    digest: Digest | None = Field(default=None, description="What the weights must be; other weights are refused.")
    format: Literal["auto", "gguf", "safetensors"] = "auto"
    served_name: str | None = Field(default=None, max_length=128, description="Defaults to the service's name.")


class Engine(ApiModel):
    attention_backend: Literal["auto", "triton", "cpu", "torch"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    quantization: Literal["none", "int8"] = Field(
        default="none", description="Of weights that the file holds unquantised; int8 rounds them, on CPUs."
    )
    prefix_caching: bool = True
    prefix_granularity: int = Field(default=16, ge=1, le=1024)
    max_model_len: int | None = Field(default=None, ge=16)
    max_batch_tokens: int = Field(default=512, ge=16, le=65536)
    max_running: int = Field(default=32, ge=1, le=1024)
    tensor_parallel: Literal[1] = 1
    data_parallel: Literal[1] = 1
    log_request_stats: bool = False
    extra_args: list[str] = Field(default_factory=list, max_length=64)


class L1(ApiModel):
    size: Quantity = "512Mi"


class L2(ApiModel):
    """The host tier. ``size`` wins over ``ratio`` (a multiple of L1)."""

    disabled: bool = False
    size: Quantity | None = None
    ratio: float | None = Field(default=None, gt=0, le=64)


class Prefetch(ApiModel):
    """When and how long a request waits for L3 before it is computed instead."""

    min_pages: int = Field(default=2, ge=1)
    timeout_base: Duration | None = Field(default=None, description="Unset: from what the worker measures.")
    timeout_per_page: Duration | None = Field(default=None, description="Unset: from what the worker measures.")
    batch_pages: int = Field(default=128, ge=1, le=1024)


class KVStoreRef(ApiModel):
    name: str = Field(min_length=1, max_length=63)


class L3(ApiModel):
    kv_store_ref: KVStoreRef
    prefetch: Prefetch = Field(default_factory=Prefetch)
    tenant_quota: Quantity | None = Field(default=None, description="Unset: an equal share of the store.")
    sharing: Literal["Service", "Shared"] = "Service"


class Cache(ApiModel):
    l1: L1 = Field(default_factory=L1)
    l2: L2 = Field(default_factory=L2)
    l3: L3 | None = None


class ResourceList(ApiModel):
    cpu: Quantity | None = None
    memory: Quantity | None = None


class Resources(ApiModel):
    requests: ResourceList = Field(default_factory=ResourceList)
    limits: ResourceList = Field(default_factory=ResourceList)


class Scheduling(ApiModel):
    node_selector: dict[str, str] = Field(default_factory=dict)


class Gateway(ApiModel):
    replicas: int = Field(default=1, ge=1, le=16)
    policy: Literal["cache_aware", "round_robin", "random", "power_of_two"] = "cache_aware"


class Rollout(ApiModel):
    strategy: Literal["RollingUpdate"] = "RollingUpdate"
    max_surge: int = Field(default=1, ge=0, le=64)
    max_unavailable: int = Field(default=0, ge=0, le=64)
    drain_timeout: Duration = "60s"
    bake: Duration = Field(default="60s", description="How long the old tenant is kept for a warm way back.")
    progress_deadline: Duration = "10m"
    flush: Literal["AfterBake", "Immediately", "Keep"] = "AfterBake"


class InferenceServiceSpec(ApiModel):
    model: Model
    weight_version: str = Field(min_length=1, max_length=128)
    engine: Engine = Field(default_factory=Engine)
    cache: Cache = Field(default_factory=Cache)
    replicas: int = Field(default=1, ge=0, le=1000)
    resources: Resources = Field(default_factory=Resources)
    scheduling: Scheduling = Field(default_factory=Scheduling)
    gateway: Gateway = Field(default_factory=Gateway)
    rollout: Rollout = Field(default_factory=Rollout)
    paused: bool = False


class _Status(ApiModel):
    # A status written by another version of the operator must stay readable.
    model_config = ConfigDict(extra="ignore")


class RevisionStatus(_Status):
    name: str
    weight_version: str = ""
    replicas: int = 0
    ready: int = 0
    namespace: str | None = None
    weights_digest: str | None = None


class RolloutStatus(_Status):
    """The move from one revision to another, as far as it has come."""

    from_revision: str = ""
    to_revision: str = ""
    step: str = ""
    message: str = ""
    started: str = ""
    progressed: str = Field(default="", description="When the last worker was replaced; the deadline counts from here.")
    bake_until: str | None = None
    streams_cut: int = 0


class FlushProof(_Status):
    """What the store said while a tenant was fenced, emptied and deleted.

    ``bytes_before`` = ``bytes_evicted`` (by the store itself, after the fence) + ``bytes_removed``. ``lost``: the
    master had restarted without the tenant; it was registered anew, closed from the first, and deleted, so the
    deletion's answer speaks for the store as it is now, and what the tenant held went with the restart.
    """

    lost: bool = False

    bytes_before: int = 0
    bytes_evicted: int = 0
    bytes_removed: int = 0
    objects_before: int = 0
    objects_removed: int = 0
    delete_status: int = 0
    delete_answer: str = ""
    seconds: float = 0.0
    finished: str = ""


class KVNamespaceStatus(_Status):
    """A claim: this service's need of a tenant, and what became of it.

    Active and Draining are wanted. Released is wanted no more and waits for the store's fence; Fenced, Flushed and
    Lost are copied from the store's ledger.
    """

    hash: str
    store: str = ""
    tenant: str = ""
    revision: str = ""
    weight_version: str = ""
    state: Literal["Active", "Draining", "Released", "Fenced", "Flushed", "Lost"] = "Active"
    since: str = ""
    bake_until: str | None = None
    proof: FlushProof | None = None


class PinnedDigest(_Status):
    """The first verified digest of a (source, weightVersion): another one under the same version is refused."""

    source: str
    weight_version: str
    digest: str


class CapacityStatus(_Status):
    bytes_per_token: int = 0
    l1_tokens: int = 0
    l2_tokens: int = 0
    l3_tokens: int = 0


class InferenceServiceStatus(_Status):
    observed_generation: int = 0
    conditions: list[Condition] = Field(default_factory=list)
    replicas: int = 0
    ready_replicas: int = 0
    selector: str = ""
    active_namespace: str = ""
    revisions: list[RevisionStatus] = Field(default_factory=list)
    rollout: RolloutStatus | None = None
    kv_namespaces: list[KVNamespaceStatus] = Field(default_factory=list)
    pinned: list[PinnedDigest] = Field(default_factory=list)
    capacity: CapacityStatus | None = None
    gateway: str = ""
