"""The worker as its routes see it: what is loaded, who is being answered, and whether it is on its way out."""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import TYPE_CHECKING

from moonpool_worker.cache.stats import CacheStats
from moonpool_worker.engine.engine import Engine, EngineDead
from moonpool_worker.engine.loading import Loaded
from moonpool_worker.engine.scheduler import Scheduler
from moonpool_worker.sampling.sampler import Sampler
from moonpool_worker.server.body_reader import BodyReader
from moonpool_worker.server.drain import Drain
from moonpool_worker.server.errors import ApiError, unavailable
from moonpool_worker.server.grants import Grants
from moonpool_worker.server.metrics import Metrics
from moonpool_worker.server.overload import Load
from moonpool_worker.server.readiness import Readiness
from moonpool_worker.settings import Settings

if TYPE_CHECKING:
    from moonpool_worker.server.generation import Generation

_SCRAPE_TIMEOUT = 2.0


class Worker:
    """``dead``: why the engine ended, "" while it lives. ``active``: API calls that are being answered."""

    def __init__(self, settings: Settings, loop: asyncio.AbstractEventLoop) -> None:
        self.settings = settings
        self.boot = str(uuid.uuid4())
        self.started = int(time.time())
        self.progress = "starting"
        self.loaded: Loaded | None = None
        self.engine: Engine | None = None
        self.dead = ""
        self.died = asyncio.Event()
        self.cache_stats: CacheStats | None = None
        self.active: set[Generation] = set()
        self.calls_changed = asyncio.Event()
        self._loop = loop
        self.bodies = BodyReader()
        self.load = Load(settings.max_running + settings.max_waiting)
        self.grants = Grants(self, settings.podinfo)
        self.readiness = Readiness(self)
        self.drain = Drain(self)
        self.metrics = Metrics(self)

    @property
    def model_name(self) -> str:
        return self.settings.served_name or self.settings.model.rstrip("/").rsplit("/", 1)[-1].removesuffix(".gguf")

    async def start_engine(self, loaded: Loaded) -> None:
        """Put the engine to work; grants that were read while loading are followed now."""
        settings = self.settings
        scheduler = Scheduler(loaded.cache, settings.max_batch_tokens, settings.max_running)
        engine = Engine(loaded.runner, loaded.cache, Sampler(loaded.argmax), scheduler, self._loop, self._on_death)
        engine.stats.on_step = self.metrics.step.observe
        engine.start()
        self.loaded, self.engine = loaded, engine
        if settings.l3_master:
            await self.grants.open_without_grant(settings.l3_tenant, settings.l3_master)
        await self.grants.loaded_now()

    def _on_death(self, error: BaseException) -> None:
        # On the engine's thread.
        self.dead = f"{type(error).__name__}: {error}"
        self._loop.call_soon_threadsafe(self.died.set)

    def accept(self, sequences: int, tokens: int = 0) -> tuple[Loaded, Engine]:
        """What a new API call works with.

        ApiError 503 when this worker cannot take any, 429 when it has too many already, 400 when this one is too large
        for it. ``tokens``: of all prompts together.
        """
        if self.dead or (self.engine is not None and not self.engine.alive):
            raise unavailable("the engine has died; the worker is about to restart", "engine_dead")
        if self.loaded is None or self.engine is None:
            raise unavailable(f"the model is not loaded yet: {self.progress}", "loading", retry_after=2)
        if self.drain.refusing:
            raise unavailable("this worker is draining; another one will answer", "draining")
        self.load.check(sequences, tokens)
        return self.loaded, self.engine

    def enter(self, call: Generation) -> None:
        self.active.add(call)
        self.load.add(len(call.choices), call.queued_tokens)

    def leave(self, call: Generation) -> None:
        if call not in self.active:
            return
        self.active.discard(call)
        self.load.remove(len(call.choices), call.queued_tokens)
        if self.drain.state != "serving":
            self.drain.finished += call.outcome != "cut"
        self.calls_changed.set()

    async def refresh_cache_stats(self) -> CacheStats | None:
        """The cache's counters; the last ones known when the engine is too busy to say."""
        if self.engine is not None and self.engine.alive:
            try:
                future = asyncio.wrap_future(self.engine.call(self.engine.cache.stats))
                self.cache_stats = await asyncio.wait_for(future, _SCRAPE_TIMEOUT)
            except (TimeoutError, EngineDead):
                pass
        return self.cache_stats

    def require_loaded(self) -> tuple[Loaded, Engine]:
        """For calls about the cache. Raises ApiError 503."""
        if self.loaded is None or self.engine is None:
            raise unavailable(f"the model is not loaded yet: {self.progress}", "loading", retry_after=2)
        if not self.engine.alive:
            raise unavailable("the engine has died", "engine_dead")
        return self.loaded, self.engine

    def require_model(self, name: str | None) -> None:
        """Raises ApiError 404 when a request names another model."""
        if name is not None and name not in (self.model_name, ""):
            raise ApiError(
                404,
                f"the model {name!r} does not exist; this worker serves {self.model_name!r}",
                param="model",
                code="model_not_found",
            )
