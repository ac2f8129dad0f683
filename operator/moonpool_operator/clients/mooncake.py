"""The admin HTTP of a Mooncake master (``docs/mooncake-admin.md``): tenants, their bytes, and what is mounted."""

from __future__ import annotations

from dataclasses import dataclass

import httpx

_TENANTS = "/api/v1/tenant_quotas"


class MasterUnavailable(Exception):
    """The master did not answer, or answered with something that is not an answer."""


@dataclass(frozen=True)
class TenantFigures:
    """What the master says of one tenant; bytes."""

    name: str
    quota: int
    effective: int
    charged: int


@dataclass(frozen=True)
class MasterFigures:
    """Bytes mounted and used, and the number of objects, over all tenants."""

    capacity: int
    used: int
    keys: int
    segments: int


@dataclass(frozen=True)
class DeleteAnswer:
    """HTTP status and words of the master on the deletion of a tenant."""

    status: int
    text: str


class MooncakeAdmin:
    """Calls to one master. Each raises MasterUnavailable when the master does not give a usable answer."""

    def __init__(self, http: httpx.AsyncClient, url: str, timeout: float) -> None:
        self._http, self._url, self._timeout = http, url.rstrip("/"), timeout

    async def tenants(self) -> dict[str, TenantFigures]:
        answer = await self._call("GET", _TENANTS, expect=(200,))
        return {figures.name: figures for figures in map(_tenant, _data(answer) or [])}

    async def tenant(self, name: str) -> TenantFigures | None:
        """The tenant's figures, or None when it isn't registered."""
        answer = await self._call("GET", _TENANTS, {"tenant_id": name}, expect=(200, 404))
        return None if answer.status_code == 404 else _tenant(_data(answer))

    async def set_quota(self, name: str, quota: int) -> TenantFigures:
        """Register the tenant, or change its quota (bytes, at least 1)."""
        body = {"requested_quota_bytes": max(1, quota)}
        answer = await self._call("PUT", _TENANTS, {"tenant_id": name}, body, expect=(200,))
        return _tenant(_data(answer))

    async def fence(self, name: str) -> TenantFigures:
        """Close the tenant for writes: one byte is the smallest quota that the master takes."""
        return await self.set_quota(name, 1)

    async def remove_all(self, name: str) -> int:
        """Remove the tenant's objects, leased ones too; how many they were."""
        query = {"force": "true", "tenant_id": name}
        answer = await self._call("POST", "/api/v1/remove_all", query, expect=(200,))
        try:
            return int(answer.json().get("removed_count", 0))
        except (ValueError, TypeError, AttributeError) as error:
            raise MasterUnavailable(f"unreadable answer: {answer.text.strip()[:200]}") from error

    async def delete(self, name: str) -> DeleteAnswer:
        """Ask the master to delete the tenant: 200, 409 while it owns anything, 404 when it isn't registered."""
        answer = await self._call("DELETE", _TENANTS, {"tenant_id": name}, expect=(200, 404, 409))
        return DeleteAnswer(answer.status_code, answer.text.strip()[:200])

    async def figures(self) -> MasterFigures:
        metrics = parse_metrics((await self._call("GET", "/metrics", expect=(200,))).text)
        return MasterFigures(
            capacity=int(metrics.get("master_total_capacity_bytes", 0)),
            used=int(metrics.get("master_allocated_bytes", 0)),
            keys=int(metrics.get("master_key_count", 0)),
            segments=int(metrics.get("series:segment_total_capacity_bytes", 0)),
        )

    async def _call(
        self,
        method: str,
        path: str,
        query: dict[str, str] | None = None,
        body: dict | None = None,
        *,
        expect: tuple[int, ...],
    ) -> httpx.Response:
        try:
            answer = await self._http.request(method, self._url + path, params=query, json=body, timeout=self._timeout)
        except httpx.HTTPError as error:
            raise MasterUnavailable(f"{self._url}: {type(error).__name__}: {error}".rstrip(": ")) from error
        if answer.status_code not in expect:
            raise MasterUnavailable(f"{method} {path}: {answer.status_code} {answer.text.strip()[:200]}")
        return answer


def parse_metrics(text: str) -> dict[str, float]:
    """Sums of Prometheus samples by metric name; ``series:<name>`` is how many non-zero series it has."""
    sums: dict[str, float] = {}
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        series, _, value = line.rpartition(" ")
        name = series.partition("{")[0].strip()
        try:
            number = float(value)
        except ValueError:
            continue
        sums[name] = sums.get(name, 0.0) + number
        if number:
            sums[f"series:{name}"] = sums.get(f"series:{name}", 0.0) + 1
    return sums


def _data(answer: httpx.Response):
    try:
        return answer.json()["data"]
    except (ValueError, KeyError, TypeError) as error:
        raise MasterUnavailable(f"unreadable answer: {answer.text.strip()[:200]}") from error


def _tenant(data: dict) -> TenantFigures:
    return TenantFigures(
        name=data["tenant_id"],
        quota=int(data.get("requested_quota_bytes", 0)),
        effective=int(data.get("effective_quota_bytes", 0)),
        charged=int(data.get("charged_bytes", 0)),
    )
