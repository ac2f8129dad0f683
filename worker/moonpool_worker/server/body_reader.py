"""Bodies from the network, with bounds on their size, their time and on all of them together."""

from __future__ import annotations

import asyncio

from starlette.requests import Request

from moonpool_worker.server.errors import ApiError

#: Far more than the prompts of one call can be.
MAX_BYTES = 16 << 20
#: Of all bodies that are being read at one time.
MAX_TOTAL_BYTES = 128 << 20
#: Seconds from a body's first byte to its last.
MAX_SECONDS = 60.0


class BodyReader:
    """Counts what it holds, so that many large bodies at once are refused instead of filling the memory."""

    def __init__(self, max_seconds: float = MAX_SECONDS) -> None:
        self.held = 0
        self._max_seconds = max_seconds

    async def read(self, request: Request) -> bytes:
        """The raw body. ApiError 413: too large; 408: too slow; 429: too many at once."""
        declared = request.headers.get("content-length", "")
        if declared.isdigit() and int(declared) > MAX_BYTES:
            raise _too_large()
        raw = bytearray()
        try:
            async with asyncio.timeout(self._max_seconds):
                async for piece in request.stream():
                    raw += piece
                    self.held += len(piece)
                    if len(raw) > MAX_BYTES:
                        raise _too_large()
                    if self.held > MAX_TOTAL_BYTES:
                        raise ApiError(
                            429,
                            f"bodies of more than {MAX_TOTAL_BYTES >> 20} MiB are arriving at this worker",
                            code="overloaded",
                            kind="rate_limit_error",
                            retry_after=1,
                        )
        except TimeoutError as failure:
            raise ApiError(
                408, f"the body did not arrive within {self._max_seconds:g} s", code="body_too_slow"
            ) from failure
        finally:
            self.held -= len(raw)
        return bytes(raw)


def _too_large() -> ApiError:
    return ApiError(413, f"the body is larger than {MAX_BYTES >> 20} MiB", code="body_too_large")
