"""Settings of the operator: images, policy and time-outs, read from ``MOONPOOL_*`` environment variables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    worker_image: str = "registry.local/moonpool/worker:dev"
    gateway_image: str = "registry.local/moonpool/gateway:dev"
    store_image: str = "registry.local/moonpool/store:dev"
    image_pull_policy: str = "IfNotPresent"
    #: hostPath weights let a service read any file of a node, so a cluster has to ask for it.
    allow_host_path: bool = False
    #: Seconds for one call to a worker or a gateway; a hung pod must not stall a reconcile for long.
    pod_call_timeout: float = 3.0
    #: Seconds for one admin call to a Mooncake master; removing a million objects takes about one second.
    master_call_timeout: float = 10.0
    #: A pod on a lost node can't be asked to stop. It is taken for gone this long after its deletion time: longer
    #: than Mooncake's own limit of 60 s for one call.
    lost_pod_deadline: float = 120.0


def from_environment(environment: Mapping[str, str] = os.environ) -> Settings:
    """Settings with the defaults replaced by ``MOONPOOL_<FIELD>`` where that is set."""
    default = Settings()

    def text(name: str, fallback: str) -> str:
        return environment.get(f"MOONPOOL_{name}") or fallback

    return Settings(
        worker_image=text("WORKER_IMAGE", default.worker_image),
        gateway_image=text("GATEWAY_IMAGE", default.gateway_image),
        store_image=text("STORE_IMAGE", default.store_image),
        image_pull_policy=text("IMAGE_PULL_POLICY", default.image_pull_policy),
        allow_host_path=text("ALLOW_HOST_PATH", "false").lower() in ("1", "true", "yes"),
        pod_call_timeout=float(text("POD_CALL_TIMEOUT", str(default.pod_call_timeout))),
        master_call_timeout=float(text("MASTER_CALL_TIMEOUT", str(default.master_call_timeout))),
        lost_pod_deadline=float(text("LOST_POD_DEADLINE", str(default.lost_pod_deadline))),
    )
