"""The operator put together: clients, queue, watches, metrics."""

from __future__ import annotations

from collections.abc import Sequence

import httpx
import kopf
import structlog
from moonpool_api import names
from prometheus_client import start_http_server

from moonpool_operator import metrics
from moonpool_operator.clients import credentials
from moonpool_operator.clients.kube import KubeClient
from moonpool_operator.handlers import watches
from moonpool_operator.queue import Key, WorkQueue
from moonpool_operator.reconcile.context import Context, make_context
from moonpool_operator.reconcile.service import reconcile_service
from moonpool_operator.reconcile.store import reconcile_store
from moonpool_operator.settings import Settings

log = structlog.get_logger()


async def run(namespaces: Sequence[str], settings: Settings, metrics_port: int, health_port: int) -> None:
    """Run until a signal. No namespaces: the whole cluster."""
    configuration = await credentials.load()
    kube = KubeClient(configuration)
    async with httpx.AsyncClient(trust_env=False, limits=httpx.Limits(max_connections=128)) as http:
        queue = work_queue(make_context(kube, http, settings))
        registry = kopf.OperatorRegistry()
        watches.register(registry, queue, credentials.for_kopf(configuration))
        if metrics_port:
            metrics.API_WRITES.set_function(lambda: kube.writes)
            start_http_server(metrics_port)
        log.info("operator starts", server=configuration.host, namespaces=list(namespaces) or "all")
        try:
            await kopf.operator(
                registry=registry,
                settings=kopf_settings(),
                standalone=True,
                clusterwide=not namespaces,
                namespaces=list(namespaces),
                liveness_endpoint=f"http://0.0.0.0:{health_port}/healthz" if health_port else None,
            )
        finally:
            await queue.close()
            await kube.close()


def work_queue(context: Context) -> WorkQueue:
    async def reconcile(key: Key) -> float | None:
        if key.kind == names.INFERENCE_SERVICE:
            return await reconcile_service(context, key.namespace, key.name)
        return await reconcile_store(context, key.namespace, key.name)

    return WorkQueue(reconcile)


def kopf_settings() -> kopf.OperatorSettings:
    """kopf is used for its watches only: no events, no annotations, no finalizers, no limit on its workers."""
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.watching.server_timeout = 300
    settings.watching.client_timeout = 330
    settings.watching.reconnect_backoff = 1
    return settings
