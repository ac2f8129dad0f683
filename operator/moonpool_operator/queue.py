"""A work queue of keys: one reconcile per key at a time, wakes that come meanwhile make one more, failures back off."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import httpx
import structlog

from moonpool_operator import metrics
from moonpool_operator.clients.kube import ApiError

log = structlog.get_logger()


@dataclass(frozen=True)
class Key:
    kind: str
    namespace: str
    name: str


Reconcile = Callable[[Key], Awaitable[float | None]]


@dataclass
class _State:
    running: bool = False
    dirty: bool = False
    failures: int = 0
    timer: asyncio.TimerHandle | None = None
    due: float = field(default=float("inf"))


class WorkQueue:
    """Wakes ``reconcile`` for keys. The value it returns is the number of seconds until the next look, or None.

    There is no limit on the number of keys at work, only on those that reconcile at the same instant: a slow object
    must not stall the others (a limit on workers per object made kopf a hundred times slower).
    """

    def __init__(
        self,
        reconcile: Reconcile,
        concurrency: int = 16,
        settle: float = 0.05,
        first_backoff: float = 0.5,
        last_backoff: float = 60.0,
    ) -> None:
        self._reconcile = reconcile
        self._slots = asyncio.Semaphore(concurrency)
        self._settle, self._first, self._last = settle, first_backoff, last_backoff
        self._states: dict[Key, _State] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    def wake(self, key: Key, after: float | None = None) -> None:
        """Reconcile ``key`` soon (a burst of events settles first), or ``after`` seconds; the sooner wake wins."""
        if self._closed:
            return
        state = self._states.setdefault(key, _State())
        if state.running and after is None:
            state.dirty = True
            return
        delay = self._settle if after is None else max(after, self._settle)
        due = time.monotonic() + delay
        if state.timer is not None:
            if state.due <= due:
                return
            state.timer.cancel()
        state.due = due
        state.timer = asyncio.get_running_loop().call_later(delay, self._start, key)

    def _start(self, key: Key) -> None:
        state = self._states[key]
        state.timer, state.due = None, float("inf")
        if state.running:
            state.dirty = True
            return
        state.running = True
        task = asyncio.get_running_loop().create_task(self._run(key, state))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, key: Key, state: _State) -> None:
        again: float | None = None
        try:
            async with self._slots:
                again = await self._once(key, state)
        finally:
            state.running = False
            if state.dirty:
                state.dirty = False
                self.wake(key)
            if again is not None:
                self.wake(key, again)
            elif state.timer is None and not state.failures:
                self._states.pop(key, None)

    async def _once(self, key: Key, state: _State) -> float | None:
        begin = time.monotonic()
        try:
            again = await self._reconcile(key)
            state.failures = 0
            return again
        except ApiError as error:
            if error.conflict:
                # Somebody wrote between our look and our write; look again.
                return self._settle
            return self._backoff(key, state, error)
        except (httpx.HTTPError, OSError) as error:
            return self._backoff(key, state, error)
        except Exception as error:
            log.exception("reconcile failed", kind=key.kind, namespace=key.namespace, name=key.name)
            return self._backoff(key, state, error)
        finally:
            metrics.RECONCILE_SECONDS.labels(kind=key.kind).observe(time.monotonic() - begin)

    def _backoff(self, key: Key, state: _State, error: Exception) -> float:
        state.failures += 1
        delay = min(self._last, self._first * 2 ** (state.failures - 1))
        metrics.RECONCILE_ERRORS.labels(kind=key.kind, error=type(error).__name__).inc()
        log.warning(
            "reconcile is tried again",
            kind=key.kind,
            namespace=key.namespace,
            name=key.name,
            error=f"{type(error).__name__}: {error}"[:500],
            seconds=delay,
        )
        return delay

    async def close(self) -> None:
        """Take no more wakes and wait for the reconciles at work."""
        self._closed = True
        for state in self._states.values():
            if state.timer is not None:
                state.timer.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=20)
