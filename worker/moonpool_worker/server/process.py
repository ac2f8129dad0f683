"""The life of a worker process: listen, load, serve, drain, exit with a code that means something."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import structlog
import uvicorn

from moonpool_worker.engine.loading import Loaded, load
from moonpool_worker.server import allocator
from moonpool_worker.server.app import build_app
from moonpool_worker.server.drain import ANNOUNCE_SECONDS
from moonpool_worker.server.silent_clients import drop_silent_clients
from moonpool_worker.server.worker import Worker
from moonpool_worker.settings import Settings, SettingsError
from moonpool_worker.weights.errors import ModelLoadError

EXIT_OK, EXIT_ENGINE_DEAD, EXIT_CANNOT_START = 0, 1, 2
#: How long a dead engine's /health says 503, and its requests get their errors, before the process ends.
_LAST_WORDS = 1.0
_TERMINATION_LOG = Path("/dev/termination-log")
#: Longer than the gateway keeps idle connections (3 s), so that it never sends into a closing one.
_KEEP_ALIVE = 30

_log = structlog.get_logger()

#: ``progress(what, done, total)`` while loading; ``loaded(worker)`` once.
OnProgress = Callable[[str, int, int], None]
OnLoaded = Callable[[Worker], None]


def run(settings: Settings, on_progress: OnProgress, on_loaded: OnLoaded) -> int:
    """Serve until told to stop; returns the exit code."""
    allocator.restrain()
    # Handing over the GIL sooner keeps tokens flowing while the engine's thread is in Python.
    sys.setswitchinterval(0.001)
    try:
        with asyncio.Runner(loop_factory=_new_loop) as runner:
            return runner.run(_serve(settings, on_progress, on_loaded))
    except KeyboardInterrupt:
        return 130


def _new_loop() -> asyncio.AbstractEventLoop:
    import uvloop

    return uvloop.new_event_loop()


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        # Signals mean drain here, not stop.
        yield


async def _serve(settings: Settings, on_progress: OnProgress, on_loaded: OnLoaded) -> int:
    loop = asyncio.get_running_loop()
    worker = Worker(settings, loop)
    config = uvicorn.Config(
        build_app(worker),
        host=settings.host,
        port=settings.port,
        http="httptools",
        loop="none",
        lifespan="off",
        ws="none",
        log_level="warning",
        access_log=False,
        timeout_keep_alive=_KEEP_ALIVE,
        timeout_graceful_shutdown=2,
        backlog=2048,
    )
    server = _Server(config)
    try:
        sockets = [config.bind_socket()]
        drop_silent_clients(sockets[0])
    except SystemExit:
        return fail(f"port {settings.port} on {settings.host} cannot be opened: choose another with --port")
    ending = _Ending(worker, server)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ending.on_signal)
    tasks = [
        asyncio.create_task(_load(worker, ending, on_progress, on_loaded), name="load"),
        asyncio.create_task(worker.grants.watch(), name="grants"),
        asyncio.create_task(_watch_engine(worker, ending), name="engine-watch"),
    ]
    try:
        await server.serve(sockets)
    finally:
        for task in tasks:
            task.cancel()
        if worker.engine is not None:
            worker.engine.stop()
        if worker.loaded is not None and worker.loaded.events is not None:
            worker.loaded.events.close()
    return ending.code


class _Ending:
    """The one place that decides how the process ends."""

    def __init__(self, worker: Worker, server: uvicorn.Server) -> None:
        self._worker = worker
        self._server = server
        self._signals = 0
        self._task: asyncio.Task[None] | None = None
        self.code = EXIT_OK

    def on_signal(self) -> None:
        self._signals += 1
        if self._signals == 1:
            self._task = asyncio.get_running_loop().create_task(self._drain_and_stop())
        elif self._worker.drain.state != "drained":
            _log.warning("second signal: ending at once", cut=len(self._worker.active))
            self._server.force_exit = True
            self._server.should_exit = True
            # The engine may be in the middle of a long step; nobody waits for it.
            asyncio.get_running_loop().call_later(0.5, os._exit, 130)

    async def _drain_and_stop(self) -> None:
        settings = self._worker.settings
        if self._worker.engine is not None and not self._worker.dead:
            # Only a gateway needs the time to notice.
            announce = 0.0 if settings.podinfo is None else ANNOUNCE_SECONDS
            await self._worker.drain.run(settings.drain_timeout, announce)
            self.stop(EXIT_OK)
        else:
            self.stop(self.code)
            # The model is loading on a thread that cannot be interrupted.
            asyncio.get_running_loop().call_later(1.0, os._exit, self.code)

    def stop(self, code: int) -> None:
        self.code = code
        self._server.should_exit = True


async def _load(worker: Worker, ending: _Ending, on_progress: OnProgress, on_loaded: OnLoaded) -> None:
    def progress(what: str, done: int, total: int) -> None:
        worker.progress = f"{what}, {100 * done // total} %" if total else what
        on_progress(what, done, total)

    try:
        loaded: Loaded = await asyncio.to_thread(load, worker.settings, progress)
        allocator.give_back()
        await worker.start_engine(loaded)
    except (SettingsError, ModelLoadError) as failure:
        ending.stop(fail(str(failure)))
        return
    except (Exception, MemoryError) as failure:
        _log.exception("loading failed")
        ending.stop(fail(f"the model could not be loaded: {type(failure).__name__}: {failure}"))
        return
    inputs = loaded.inputs
    _log.info(
        "loaded",
        namespace=loaded.namespace,
        weights_digest=inputs.weights_digest,
        weight_version=inputs.weight_version,
        dtype=inputs.dtype,
        weights_bytes=loaded.weights_bytes,
        l1_tokens=loaded.l1_tokens,
        l2_tokens=loaded.l2_tokens,
        max_model_len=loaded.max_model_len,
    )
    on_loaded(worker)


async def _watch_engine(worker: Worker, ending: _Ending) -> None:
    await worker.died.wait()
    fail(f"the engine died: {worker.dead}")
    await asyncio.sleep(_LAST_WORDS)
    ending.stop(EXIT_ENGINE_DEAD)


def fail(sentence: str) -> int:
    """Say why the process ends, where people and Kubernetes look; returns the exit code for a failed start."""
    sentence = " ".join(sentence.split())
    print(f"moonpool-worker: {sentence}", file=sys.stderr, flush=True)
    if _TERMINATION_LOG.exists():
        with contextlib.suppress(OSError):
            _TERMINATION_LOG.write_text(sentence)
    return EXIT_CANNOT_START
