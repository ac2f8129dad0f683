"""The watches: every handler turns an event into wakes of the work queue and nothing else."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import kopf
from moonpool_api import names

from moonpool_operator.handlers.wake import References, after_child, after_service, after_store
from moonpool_operator.queue import Key, WorkQueue

_CHILDREN = (("", "v1", "pods"), ("apps", "v1", "replicasets"), ("apps", "v1", "deployments"))
_STORE_CHILDREN = (("", "v1", "pods"), ("apps", "v1", "deployments"), ("apps", "v1", "statefulsets"))


def register(registry: kopf.OperatorRegistry, queue: WorkQueue, connection: kopf.ConnectionInfo) -> None:
    references = References()

    def wake(keys: Iterable[Key]) -> None:
        for key in keys:
            queue.wake(key)

    @kopf.on.login(registry=registry)
    def login(**_: Any) -> kopf.ConnectionInfo:
        return connection

    @kopf.on.event(names.GROUP, names.VERSION, names.INFERENCE_SERVICES, registry=registry)
    async def service(event: kopf.RawEvent, body: kopf.Body, **_: Any) -> None:
        wake(after_service(references, event["type"], body))

    @kopf.on.event(names.GROUP, names.VERSION, names.KV_STORES, registry=registry)
    async def store(body: kopf.Body, **_: Any) -> None:
        wake(after_store(references, body))

    async def child(event: kopf.RawEvent, body: kopf.Body, **_: Any) -> None:
        wake(after_child(references, event["type"], body))

    for label, resources in ((names.LABEL_SERVICE, _CHILDREN), (names.LABEL_STORE, _STORE_CHILDREN)):
        for resource in resources:
            kopf.on.event(*resource, labels={label: kopf.PRESENT}, registry=registry)(child)
