"""Carries the operator's grant from podinfo, or from its nudge, to the cache."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from moonpool_worker.cache.store_tier.client import StoreState
from moonpool_worker.engine.engine import EngineDead
from moonpool_worker.server import podinfo
from moonpool_worker.server.podinfo import Grant

if TYPE_CHECKING:
    from moonpool_worker.server.worker import Worker

_log = structlog.get_logger()
_INTERVAL = 1.0


class Grants:
    """``verified``: the namespace that the operator verified for this pod, "" as long as it has not.

    A nudge arrives earlier than the kubelet's next write of the file (up to a minute), so it counts until the file
    says something new.
    """

    def __init__(self, worker: Worker, folder: Path | None) -> None:
        self._worker = worker
        self._folder = folder
        self._file: Grant | None = None
        self._granted: tuple[str, str] = ("", "")
        self._lock = asyncio.Lock()
        self._closed = False
        self.verified = ""

    async def watch(self) -> None:
        """Read the file each second, for ever."""
        while True:
            await self.read()
            await asyncio.sleep(_INTERVAL)

    async def read(self) -> None:
        if self._folder is None:
            return
        grant = await asyncio.to_thread(podinfo.read_grant, self._folder)
        if grant is None or grant == self._file:
            return
        self._file = grant
        await self._follow(grant)

    async def nudge(self, grant: Grant) -> StoreState:
        """Follow what the operator says now; returns L3's state when a close is done, or an open begun."""
        await self._follow(grant)
        return await self.state()

    async def state(self) -> StoreState:
        engine = self._worker.engine
        if engine is None or not engine.alive:
            return StoreState("off")
        return engine.cache.store_state()

    async def close(self) -> None:
        """Close L3 for good: the pod is about to leave."""
        self._folder = None
        self._closed = True
        await self._apply("", "")

    async def _follow(self, grant: Grant) -> None:
        self.verified = grant.namespace
        loaded = self._worker.loaded
        if loaded is None:
            # Taken up again by the caller of `loaded_now`.
            return
        if grant.namespace != loaded.namespace or not (grant.tenant and grant.master):
            await self._apply("", "")
        elif self._worker.settings.l3:
            await self._apply(grant.tenant, grant.master)

    async def loaded_now(self) -> None:
        """The model is loaded: follow what was read while it was not."""
        if self._file is not None:
            await self._follow(self._file)

    async def _apply(self, tenant: str, master: str) -> None:
        engine = self._worker.engine
        loaded = self._worker.loaded
        if engine is None or loaded is None:
            return
        async with self._lock:
            # A late nudge, or a load that ends after the drain, must not open what was closed for good.
            if (self._closed and tenant) or (tenant, master) == self._granted:
                return
            cache = engine.cache
            try:
                if tenant:
                    _log.info("opening L3", tenant=tenant, master=master)
                    await asyncio.wrap_future(engine.call(lambda: cache.open_store(loaded.namespace, tenant, master)))
                else:
                    _log.info("closing L3")
                    await asyncio.wrap_future(engine.call(cache.close_store))
            except EngineDead:
                return
            self._granted = (tenant, master)

    async def open_without_grant(self, tenant: str, master: str) -> None:
        """``--l3-master``: no operator, no grant."""
        await self._apply(tenant, master)
