"""A small asynchronous client of the Kubernetes API: raw objects in, raw objects out.

The operator needs six verbs on a dozen kinds and works on plain dictionaries, so it speaks REST through httpx.
"""

from __future__ import annotations

import json
from typing import Any

import httpx
from kubernetes.aio.client.configuration import Configuration
from moonpool_api import names

from moonpool_operator.clients import credentials

Object = dict[str, Any]

_APPLY = "application/apply-patch+yaml"
_MERGE = "application/merge-patch+json"
_STRATEGIC = "application/strategic-merge-patch+json"

#: (apiVersion, plural) by kind: everything that the operator reads or writes.
RESOURCES: dict[str, tuple[str, str]] = {
    "Pod": ("v1", "pods"),
    "Service": ("v1", "services"),
    "ServiceAccount": ("v1", "serviceaccounts"),
    "Event": ("v1", "events"),
    "Namespace": ("v1", "namespaces"),
    "ReplicaSet": ("apps/v1", "replicasets"),
    "Deployment": ("apps/v1", "deployments"),
    "StatefulSet": ("apps/v1", "statefulsets"),
    "Role": ("rbac.authorization.k8s.io/v1", "roles"),
    "RoleBinding": ("rbac.authorization.k8s.io/v1", "rolebindings"),
    names.INFERENCE_SERVICE: (names.API_VERSION, names.INFERENCE_SERVICES),
    names.KV_STORE: (names.API_VERSION, names.KV_STORES),
}


class ApiError(Exception):
    """The API server refused a call; ``status`` is the HTTP status, ``reason`` the API's own word for it."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(f"{status} {reason}: {message}")
        self.status, self.reason, self.message = status, reason, message

    @property
    def conflict(self) -> bool:
        return self.status == 409

    @property
    def not_found(self) -> bool:
        return self.status == 404


def resource_path(kind: str, namespace: str | None, name: str | None = None, subresource: str | None = None) -> str:
    version, plural = RESOURCES[kind]
    root = f"/api/{version}" if version == "v1" else f"/apis/{version}"
    scope = f"/namespaces/{namespace}" if namespace and kind != "Namespace" else ""
    return root + scope + f"/{plural}" + (f"/{name}" if name else "") + (f"/{subresource}" if subresource else "")


class KubeClient:
    """Verbs on objects. Raises ApiError on a refusal and httpx.HTTPError when the server can't be reached."""

    def __init__(self, configuration: Configuration, timeout: float = 30.0) -> None:
        self._configuration = configuration
        self._http = httpx.AsyncClient(
            base_url=configuration.host,
            verify=credentials.ssl_context(configuration),
            timeout=timeout,
            limits=httpx.Limits(max_connections=32, max_keepalive_connections=16),
            trust_env=False,
        )
        #: Calls that were sent to change something; tests assert that an idle operator makes none.
        self.writes = 0

    async def close(self) -> None:
        await self._http.aclose()

    async def get(self, kind: str, namespace: str | None, name: str) -> Object | None:
        """The object, or None when there is none."""
        try:
            return await self._call("GET", resource_path(kind, namespace, name))
        except ApiError as error:
            if error.not_found:
                return None
            raise

    async def list(self, kind: str, namespace: str | None, labels: dict[str, str] | None = None) -> list[Object]:
        """All objects of a kind, read from etcd and not from a cache that may lag."""
        params: dict[str, str] = {"limit": "500"}
        if labels:
            params["labelSelector"] = ",".join(f"{key}={value}" for key, value in labels.items())
        items: list[Object] = []
        while True:
            page = await self._call("GET", resource_path(kind, namespace), params=params)
            items += page.get("items", [])
            more = page.get("metadata", {}).get("continue")
            if not more:
                break
            params["continue"] = more
        # A list leaves out what is the same for all its items.
        version = RESOURCES[kind][0]
        return [{"apiVersion": version, "kind": kind, **item} for item in items]

    async def apply(self, manifest: Object, subresource: str | None = None) -> Object:
        """Server-side apply with the operator's one field manager, taking over fields that others changed."""
        metadata = manifest["metadata"]
        path = resource_path(manifest["kind"], metadata.get("namespace"), metadata["name"], subresource)
        params = {"fieldManager": names.FIELD_MANAGER, "force": "true"}
        return await self._write("PATCH", path, manifest, _APPLY, params)

    async def refusal(self, manifest: Object) -> str:
        """Why the API server would not take ``manifest``, in its own words, or ""; nothing is written."""
        metadata = manifest["metadata"]
        path = resource_path(manifest["kind"], metadata.get("namespace"), metadata["name"])
        params = {"fieldManager": names.FIELD_MANAGER, "force": "true", "dryRun": "All"}
        try:
            await self._call("PATCH", path, body=manifest, content_type=_APPLY, params=params)
        except ApiError as error:
            if error.status in (400, 403, 422):
                return error.message
            raise
        return ""

    async def merge(self, kind: str, namespace: str, name: str, patch: Object) -> Object:
        params = {"fieldManager": names.FIELD_MANAGER}
        return await self._write("PATCH", resource_path(kind, namespace, name), patch, _MERGE, params)

    async def patch_pod_status(self, namespace: str, name: str, patch: Object) -> Object:
        """A strategic merge: conditions are matched by type, so the kubelet's own stay as they are."""
        params = {"fieldManager": names.FIELD_MANAGER}
        return await self._write("PATCH", resource_path("Pod", namespace, name, "status"), patch, _STRATEGIC, params)

    async def create(self, manifest: Object) -> Object:
        path = resource_path(manifest["kind"], manifest["metadata"].get("namespace"))
        return await self._write("POST", path, manifest, "application/json", {"fieldManager": names.FIELD_MANAGER})

    async def delete(self, kind: str, namespace: str, name: str, uid: str | None = None) -> None:
        """Delete, if ``uid`` is given only that very object; one that is gone already is a success."""
        options: Object = {"propagationPolicy": "Background"}
        if uid:
            options["preconditions"] = {"uid": uid}
        try:
            await self._write("DELETE", resource_path(kind, namespace, name), options, "application/json", {})
        except ApiError as error:
            if not error.not_found and not error.conflict:
                raise

    async def _write(self, method: str, path: str, body: Object, content_type: str, params: dict[str, str]) -> Object:
        self.writes += 1
        return await self._call(method, path, body=body, content_type=content_type, params=params)

    async def _call(
        self,
        method: str,
        path: str,
        *,
        body: Object | None = None,
        content_type: str = "application/json",
        params: dict[str, str] | None = None,
    ) -> Object:
        headers = {"Accept": "application/json", "User-Agent": names.FIELD_MANAGER}
        if token := credentials.authorization(self._configuration):
            headers["Authorization"] = token
        content = None
        if body is not None:
            headers["Content-Type"] = content_type
            content = json.dumps(body).encode()
        answer = await self._http.request(method, path, params=params, headers=headers, content=content)
        if answer.is_success:
            return answer.json() if answer.content else {}
        raise _refusal(answer)


def _refusal(answer: httpx.Response) -> ApiError:
    try:
        status = answer.json()
        return ApiError(answer.status_code, status.get("reason", ""), status.get("message", ""))
    except ValueError:
        return ApiError(answer.status_code, answer.reason_phrase, answer.text[:200])
