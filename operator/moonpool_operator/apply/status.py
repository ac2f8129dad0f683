"""Status by server-side apply, only when it differs, and Events for what changed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from datetime import UTC, datetime

import httpx
import structlog
from moonpool_api import names

from moonpool_operator.clients.kube import ApiError, KubeClient, Object
from moonpool_operator.plan.story import Story

log = structlog.get_logger()


async def write_status(
    kube: KubeClient,
    kind: str,
    namespace: str,
    name: str,
    before: object,
    status: Object,
    resource_version: str,
) -> tuple[bool, str]:
    """(was it written, the object's resource version now).

    The write fails with a conflict when the object changed since it was observed: a plan is carried out only on what
    it was made from, also when two operators run at once by mistake.
    """
    if before == status:
        return False, resource_version
    manifest = {
        "apiVersion": names.API_VERSION,
        "kind": kind,
        "metadata": {"name": name, "namespace": namespace, "resourceVersion": resource_version},
        "status": status,
    }
    written = await kube.apply(manifest, "status")
    return True, written["metadata"]["resourceVersion"]


async def tell(kube: KubeClient, kind: str, namespace: str, name: str, uid: str, stories: Iterable[Story]) -> None:
    """Events are told once and best effort: a lost one costs nothing but a line."""
    for story in stories:
        log.info("event", kind=kind, namespace=namespace, name=name, reason=story.reason, message=story.message)
        try:
            await kube.create(_event(kind, namespace, name, uid, story))
        except (ApiError, httpx.HTTPError) as error:
            log.warning("event was refused", reason=story.reason, error=str(error))


def _event(kind: str, namespace: str, name: str, uid: str, story: Story) -> Object:
    now = datetime.now(UTC)
    text = now.strftime("%Y-%m-%dT%H:%M:%SZ")
    digest = hashlib.sha256(f"{uid}{story.reason}{story.message}{now.isoformat()}".encode()).hexdigest()[:16]
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{name}.{digest}", "namespace": namespace},
        "involvedObject": {
            "apiVersion": names.API_VERSION,
            "kind": kind,
            "namespace": namespace,
            "name": name,
            "uid": uid,
        },
        "reason": story.reason,
        "message": story.message[:1000],
        "type": "Normal" if story.normal else "Warning",
        "source": {"component": names.FIELD_MANAGER},
        "reportingComponent": names.FIELD_MANAGER,
        "firstTimestamp": text,
        "lastTimestamp": text,
        "count": 1,
    }
