"""The gateway's own view of its workers (smg, ``GET /workers``)."""

from __future__ import annotations

from urllib.parse import urlsplit

import httpx
from moonpool_api.names import PORT_GATEWAY


class GatewayClient:
    def __init__(self, http: httpx.AsyncClient, timeout: float, port: int = PORT_GATEWAY) -> None:
        self._http, self._timeout, self._port = http, timeout, port

    async def healthy_workers(self, ip: str) -> frozenset[str] | None:
        """Addresses of the workers that this gateway sends requests to, or None when it does not answer."""
        host = f"[{ip}]" if ":" in ip else ip
        try:
            answer = await self._http.get(f"http://{host}:{self._port}/workers", timeout=self._timeout)
            if answer.status_code != 200:
                return None
            return healthy_addresses(answer.json())
        except (httpx.HTTPError, ValueError, TypeError, AttributeError):
            return None


def healthy_addresses(body: dict) -> frozenset[str]:
    """Hosts of the workers that are healthy and not draining."""
    hosts = set()
    for worker in body.get("workers", []):
        if worker.get("is_healthy") and worker.get("status", "ready") in ("ready", "healthy", "active"):
            host = urlsplit(worker.get("url", "")).hostname
            if host:
                hosts.add(host)
    return frozenset(hosts)
