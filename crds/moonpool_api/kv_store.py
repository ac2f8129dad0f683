"""KVStore: a Mooncake master and the store pods that lend it their memory."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from moonpool_api.conditions import Condition
from moonpool_api.inference_service import Duration, FlushProof, Quantity, Resources, _Status
from moonpool_api.model import ApiModel


class Master(ApiModel):
    replicas: Literal[1] = 1
    resources: Resources = Field(default_factory=Resources)
    lease_ttl: Duration = Field(default="5s", alias="leaseTTL")
    eviction_high_watermark: float = Field(default=0.9, gt=0, le=1)


class Stores(ApiModel):
    replicas: int = Field(default=1, ge=0, le=256)
    segment_size: Quantity = "1Gi"
    resources: Resources = Field(default_factory=Resources)


class KVStoreSpec(ApiModel):
    master: Master = Field(default_factory=Master)
    stores: Stores = Field(default_factory=Stores)
    protocol: Literal["tcp"] = "tcp"


class TenantStatus(_Status):
    """A tenant that this store holds or held, as the ledger of who may write.

    States go one way only: Registered, Fenced, Flushed. ``Lost`` is a tenant whose store came back empty.
    """

    name: str
    namespace: str
    epoch: int = 0
    service: str = Field(default="", description="The service that claimed it first.")
    claimed_by: list[str] = Field(default_factory=list, description="Services that want this tenant now.")
    state: Literal["Registered", "Fenced", "Flushed", "Lost"] = "Registered"
    quota: int = 0
    bytes: int = 0
    step: str = ""
    fenced_at: str | None = None
    proof: FlushProof | None = None


class RetiredEpoch(_Status):
    """The last epoch of a namespace whose tenant was fenced; the next one starts above it."""

    namespace: str
    epoch: int


class KVStoreStatus(_Status):
    observed_generation: int = 0
    conditions: list[Condition] = Field(default_factory=list)
    master: str = ""
    master_instance: str = Field(default="", description="Changes when the master restarts, which empties the store.")
    capacity: int = 0
    used: int = 0
    keys: int = 0
    segments: int = 0
    tenants: list[TenantStatus] = Field(default_factory=list)
    retired: list[RetiredEpoch] = Field(default_factory=list)
