"""A worker's HTTP, as far as the operator uses it (``docs/interfaces.md``)."""

from __future__ import annotations

from dataclasses import dataclass

import httpx
from moonpool_api.names import PORT_WORKER
from moonpool_api.namespace import NamespaceInputs
from pydantic import ValidationError


@dataclass(frozen=True)
class WorkerReport:
    """What a worker says about itself.

    ``problem`` is set, and the rest empty, when there is no report yet (``loading``) or an unreadable one.
    """

    namespace: str = ""
    inputs: NamespaceInputs | None = None
    weights_digest: str = ""
    boot: str = ""
    l3_state: str = "off"
    l3_tenant: str = ""
    l3_error: str = ""
    bytes_per_token: int = 0
    l1_tokens: int = 0
    l2_tokens: int = 0
    loading: bool = False
    problem: str = ""


class WorkerClient:
    def __init__(self, http: httpx.AsyncClient, timeout: float, port: int = PORT_WORKER) -> None:
        self._http, self._timeout, self._port = http, timeout, port

    async def report(self, ip: str) -> WorkerReport:
        """The worker's report. Never raises: a worker that can't be asked is a fact to plan with."""
        try:
            answer = await self._http.get(self._url(ip, "/v1/cache/namespace"), timeout=self._timeout)
        except httpx.HTTPError as error:
            return WorkerReport(loading=True, problem=f"does not answer yet ({type(error).__name__})")
        if answer.status_code != 200:
            return WorkerReport(loading=True, problem=f"answers {answer.status_code}: {answer.text[:200]}")
        try:
            return _report(answer.json())
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            return WorkerReport(problem=f"unreadable report: {_brief(error)}")

    async def grant(self, ip: str, namespace: str, tenant: str, master: str) -> str:
        """Nudge the worker to what its annotations say; an error text, or "" when it took the grant."""
        body = {"namespace": namespace, "tenant": tenant, "master": master}
        try:
            answer = await self._http.post(self._url(ip, "/v1/cache/grant"), json=body, timeout=self._timeout)
        except httpx.HTTPError as error:
            return f"does not answer ({type(error).__name__})"
        return "" if answer.status_code == 200 else f"answers {answer.status_code}: {answer.text[:200]}"

    def _url(self, ip: str, path: str) -> str:
        return f"http://{f'[{ip}]' if ':' in ip else ip}:{self._port}{path}"


def _report(body: dict) -> WorkerReport:
    l3, capacity = body.get("l3") or {}, body.get("capacity") or {}
    return WorkerReport(
        namespace=body["namespace"],
        inputs=NamespaceInputs.model_validate(body["inputs"]),
        weights_digest=body["weights_digest"],
        boot=body.get("boot", ""),
        l3_state=l3.get("state", "off"),
        l3_tenant=l3.get("tenant", ""),
        l3_error=l3.get("error", ""),
        bytes_per_token=int(capacity.get("bytes_per_token", 0)),
        l1_tokens=int(capacity.get("l1_tokens", 0)),
        l2_tokens=int(capacity.get("l2_tokens", 0)),
    )


def _brief(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return f"{type(error).__name__}: {error}"
