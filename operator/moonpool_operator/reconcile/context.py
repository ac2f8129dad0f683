"""What a reconcile needs from the outside."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime

import httpx
from moonpool_api.names import PORT_MASTER_HTTP

from moonpool_operator.clients.gateway import GatewayClient
from moonpool_operator.clients.kube import KubeClient
from moonpool_operator.clients.mooncake import MooncakeAdmin
from moonpool_operator.clients.worker import WorkerClient
from moonpool_operator.observe.model import Pod
from moonpool_operator.settings import Settings


def utc_now() -> datetime:
    return datetime.now(UTC)


@dataclass(frozen=True)
class Context:
    kube: KubeClient
    workers: WorkerClient
    gateways: GatewayClient
    admin_of: Callable[[Pod], MooncakeAdmin]
    settings: Settings
    clock: Callable[[], datetime] = field(default=utc_now)


def make_context(kube: KubeClient, http: httpx.AsyncClient, settings: Settings) -> Context:
    def admin_of(master: Pod) -> MooncakeAdmin:
        host = f"[{master.ip}]" if ":" in master.ip else master.ip
        return MooncakeAdmin(http, f"http://{host}:{PORT_MASTER_HTTP}", settings.master_call_timeout)

    return Context(
        kube=kube,
        workers=WorkerClient(http, settings.pod_call_timeout),
        gateways=GatewayClient(http, settings.pod_call_timeout),
        admin_of=admin_of,
        settings=settings,
    )
