"""The engine: a thread that owns scheduler, cache and model, and is reached through its inbox only."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol, TypeVar

import torch

from moonpool_worker.cache.kv_cache import KVCache
from moonpool_worker.engine.batch import StepBatch
from moonpool_worker.engine.delivery import Delivery
from moonpool_worker.engine.request import FinishReason, Output, Request
from moonpool_worker.engine.scheduler import Scheduler, Work
from moonpool_worker.engine.statistics import EngineStats
from moonpool_worker.engine.wakeup import Wakeup
from moonpool_worker.sampling.sampler import SampledToken, Sampler

T = TypeVar("T")

#: How long to sleep when nothing runs: while a request waits for L3, while L3 is open, and otherwise.
_FETCH_POLL = 0.02
_STORE_POLL = 0.25
#: Prompt tokens of a step from which the rate of prefill is learned.
_TELLING = 16


class Runner(Protocol):
    def forward(self, batch: StepBatch) -> torch.Tensor: ...


class EngineDead(RuntimeError):
    """The engine's thread has ended; nothing will be computed any more."""


class Engine:
    """``submit``, ``abort`` and ``call`` may be called from any thread; everything else happens on the engine's.

    ``on_death(error)`` is called on the engine's thread when it ends by an exception; all requests have been aborted.
    """

    def __init__(
        self,
        runner: Runner,
        cache: KVCache,
        sampler: Sampler,
        scheduler: Scheduler,
        loop: asyncio.AbstractEventLoop,
        on_death: Callable[[BaseException], None] = lambda error: None,
    ) -> None:
        self.cache = cache
        self.scheduler = scheduler
        self.stats = EngineStats()
        self.death: BaseException | None = None
        self._runner = runner
        self._sampler = sampler
        self._delivery = Delivery(loop)
        self._on_death = on_death
        self._inbox: deque[Callable[[], object]] = deque()
        #: Nothing is put into the inbox of a thread that will not look into it any more.
        self._gate = threading.Lock()
        self._wakeup = Wakeup()
        self._stopping = False
        self._ended = threading.Event()
        self._requests: dict[str, list[Request]] = {}
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # -- from any thread ---------------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def submit(self, requests: list[Request]) -> None:
        """All choices of one API call; they share an id. EngineDead when the thread has ended."""
        self._post(lambda: self._add(requests))

    def abort(self, request_id: str, error: str = "") -> None:
        """Give up what is left of an API call; its choices end with an ``abort`` output. No error when it is over."""
        with contextlib.suppress(EngineDead):
            self._post(lambda: self._abort(request_id, error))

    def abort_all(self, error: str) -> None:
        def abort() -> None:
            for request_id in list(self._requests):
                self._abort(request_id, error)

        self._post(abort)

    def call(self, work: Callable[[], T]) -> Future[T]:
        """Run ``work`` on the engine's thread, between two steps."""
        future: Future[T] = Future()

        def run() -> None:
            # Whoever gave up waiting has cancelled it; a result would then be an error, on this thread.
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(work())
            except Exception as failure:
                future.set_exception(failure)

        self._post(run)
        return future

    def stop(self, timeout: float = 10.0) -> None:
        """End the thread after the current step and close the cache. Requests still there are aborted."""
        self._stopping = True
        self._wakeup.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout)

    @property
    def alive(self) -> bool:
        return self.death is None and not self._ended.is_set()

    def _post(self, item: Callable[[], object]) -> None:
        with self._gate:
            if not self.alive:
                raise EngineDead(f"the engine is not running: {self.death or 'stopped'}")
            self._inbox.append(item)
        self._wakeup.set()

    # -- the thread --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                while not self._stopping:
                    if not self._turn():
                        self._wakeup.wait(self._patience(), self.cache.fileno())
        except BaseException as failure:
            self.death = failure
        finally:
            self._end()

    def _end(self) -> None:
        with self._gate:
            self._ended.set()
        reason = f"the engine died: {self.death}" if self.death else "the worker is stopping"
        for request_id in list(self._requests):
            self._fail(request_id, reason)
        # What was posted meanwhile gets its answer too: calls run, submissions are aborted like the rest.
        while self._inbox:
            self._inbox.popleft()()
        for request_id in list(self._requests):
            self._fail(request_id, reason)
        self._delivery.flush()
        if self.death is not None:
            self._on_death(self.death)
        else:
            self.cache.close()

    def _fail(self, request_id: str, error: str) -> None:
        """Answer without touching scheduler or cache, whose state is unknown after an exception."""
        for request in self._requests.pop(request_id, ()):
            if request.finish_reason is None:
                request.finish_reason = FinishReason.ABORT
                self._delivery.add(request.sink, request.index, Output("", None, FinishReason.ABORT, error))

    def _patience(self) -> float | None:
        if self.scheduler.fetching:
            return _FETCH_POLL
        return None if self.cache.store_state().state in ("off", "closed") else _STORE_POLL

    def _turn(self) -> bool:
        """Take in what came, and compute one step; False when there was nothing to compute."""
        while self._inbox:
            self._inbox.popleft()()
        self.cache.poll()
        work = self.scheduler.schedule()
        if work:
            self._step(work)
        self.stats.running = len(self.scheduler.running)
        self.stats.waiting = len(self.scheduler.waiting)
        self.stats.preemptions = self.scheduler.preemptions
        self._delivery.flush()
        return bool(work)

    def _step(self, work: list[Work]) -> None:
        started = time.monotonic()
        logits = self._runner.forward(StepBatch([item.chunk for item in work]))
        self.scheduler.computed(work)
        sampling = [item.request for item in work if item.chunk.wants_logits]
        if sampling:
            now = time.monotonic()
            tokens = self._sampler.sample(
                logits, [request.sampling for request in sampling], [request.chance for request in sampling]
            )
            for request, token in zip(sampling, tokens, strict=True):
                self._take(request, token, now)
        computed = sum(len(item.chunk.token_ids) for item in work)
        seconds = time.monotonic() - started
        self.stats.steps += 1
        self.stats.step_seconds += seconds
        self.stats.prefill_tokens += computed - len(sampling)
        self.stats.generated_tokens += len(sampling)
        self.stats.on_step(seconds)
        prompt = sum(size for item in work if (size := len(item.chunk.token_ids)) > 1)
        # A few tokens beside many that decode say little about what a prompt costs.
        if prompt >= _TELLING and 2 * prompt > computed:
            self.cache.observe_prefill(prompt, seconds)

    def _take(self, request: Request, token: SampledToken, now: float) -> None:
        """Add a new token to its sequence, and end the sequence when it was the last."""
        request.token_ids.append(token.token_id)
        request.timeline.produced(now)
        if token.token_id in request.stop_ids:
            text = request.text.finish()
            reason: FinishReason | None = FinishReason.STOP
        else:
            text, stopped = request.text.push(token.token_id)
            reason = FinishReason.STOP if stopped else None
            if reason is None and request.generated >= request.max_tokens:
                text += request.text.finish()
                reason = FinishReason.LENGTH
        self._delivery.add(request.sink, request.index, Output(text, token, reason))
        if reason is not None:
            self._finish(request, reason)

    def _add(self, requests: list[Request]) -> None:
        for request in requests:
            self._requests.setdefault(request.id, []).append(request)
            if self._ended.is_set():
                continue
            try:
                self.scheduler.add(request)
            except ValueError as failure:
                request.finish_reason = FinishReason.ABORT
                self._delivery.add(request.sink, request.index, Output("", None, FinishReason.ABORT, str(failure)))
                self._forget(request)

    def _abort(self, request_id: str, error: str) -> None:
        for request in list(self._requests.get(request_id, ())):
            self._delivery.add(request.sink, request.index, Output("", None, FinishReason.ABORT, error))
            self._finish(request, FinishReason.ABORT)

    def _finish(self, request: Request, reason: FinishReason) -> None:
        request.finish_reason = reason
        self.scheduler.remove(request)
        self._forget(request)

    def _forget(self, request: Request) -> None:
        choices = self._requests.get(request.id, [])
        if request in choices:
            choices.remove(request)
        if not choices:
            self._requests.pop(request.id, None)
