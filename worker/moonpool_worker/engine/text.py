"""One sequence's text: tokens decoded, stop strings heeded."""

from __future__ import annotations

from collections.abc import Sequence

from moonpool_worker.engine.stop_strings import StopStrings
from moonpool_worker.tokenizer.tokenizer import StreamDecoder


class StoppableText:
    """The :class:`~moonpool_worker.engine.request.TextStream` of a real tokenizer."""

    def __init__(self, decoder: StreamDecoder, stops: Sequence[str] = ()) -> None:
        self._decoder = decoder
        self._stops = StopStrings(stops)

    def push(self, token_id: int) -> tuple[str, bool]:
        return self._stops.push(self._decoder.step(token_id))

    def finish(self) -> str:
        text, stopped = self._stops.push(self._decoder.flush())
        return text if stopped else text + self._stops.finish()
