"""From the engine's thread to the event loop: one wake-up per step, and no polling."""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import Callable

from moonpool_worker.engine.request import FinishReason, Output, Sink


class OutputStream:
    """Outputs of all choices of one API call, in the order they were made. Used on the event loop only.

    When more than ``limit`` of them wait to be read, ``on_overflow`` is called once, and from then on only the end of
    the call is taken.
    """

    def __init__(self, limit: int = sys.maxsize, on_overflow: Callable[[], None] = lambda: None) -> None:
        self._outputs: deque[tuple[int, Output]] = deque()
        self._arrived = asyncio.Event()
        self._limit = limit
        self._on_overflow = on_overflow
        self._overflown = False

    def put(self, index: int, output: Output) -> None:
        if len(self._outputs) >= self._limit and not self._overflown:
            self._overflown = True
            self._on_overflow()
        if self._overflown and output.finish_reason is not FinishReason.ABORT:
            return
        self._outputs.append((index, output))
        self._arrived.set()

    async def get(self) -> tuple[int, Output]:
        """The next output and the choice it belongs to."""
        while not self._outputs:
            self._arrived.clear()
            await self._arrived.wait()
        return self._outputs.popleft()


class Delivery:
    """Collects a step's outputs and hands them over in one call into ``loop``."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._batch: list[tuple[Sink, int, Output]] = []

    def add(self, sink: Sink, index: int, output: Output) -> None:
        self._batch.append((sink, index, output))

    def flush(self) -> None:
        if not self._batch:
            return
        batch, self._batch = self._batch, []
        try:
            self._loop.call_soon_threadsafe(_deliver, batch)
        except RuntimeError:
            # The loop is closed: the process is ending and nobody listens.
            return


def _deliver(batch: list[tuple[Sink, int, Output]]) -> None:
    for sink, index, output in batch:
        sink.put(index, output)
