"""How much a worker takes on, and when to come back when that is too much."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable

from moonpool_worker.server.errors import ApiError

#: Prompts are lists of numbers: so many tokens take about 150 MB, whatever the number of sequences.
MAX_TOKENS = 4 << 20
#: Bounds of Retry-After, in seconds.
SOONEST, LATEST = 1, 60
#: The rate is that of the last so many sequences.
_MEASURED = 64


class Load:
    """Sequences and prompt tokens in a worker, running or waiting, against their limits.

    ``limit``: sequences. A prompt is always taken by an idle worker, however long it is.
    """

    def __init__(self, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit = limit
        self.sequences = 0
        self.tokens = 0
        self.refused = 0
        self._clock = clock
        self._ended: deque[tuple[float, int]] = deque(maxlen=_MEASURED)

    def check(self, sequences: int, tokens: int = 0) -> None:
        """ApiError 400 for what could never be taken, 429 with Retry-After for what cannot be taken now."""
        if sequences > self.limit:
            raise ApiError(
                400, f"prompts times n are {sequences} sequences; no more than {self.limit} fit in a request", param="n"
            )
        if self.sequences + sequences > self.limit:
            self._refuse(
                f"{self.sequences} sequences are running or waiting, and no more than {self.limit} may",
                self.sequences + sequences - self.limit,
            )
        if self.sequences and self.tokens + tokens > MAX_TOKENS:
            self._refuse(
                f"prompts of {self.tokens} tokens are running or waiting, and no more than {MAX_TOKENS} may", 1
            )

    def add(self, sequences: int, tokens: int) -> None:
        self.sequences += sequences
        self.tokens += tokens

    def remove(self, sequences: int, tokens: int) -> None:
        """They are over, however they ended."""
        self.sequences -= sequences
        self.tokens -= tokens
        self._ended.append((self._clock(), sequences))

    def retry_after(self, sequences: int) -> int:
        """Whole seconds until so many sequences will have ended, at the rate of the last ones."""
        if not self._ended:
            return SOONEST
        elapsed = self._clock() - self._ended[0][0]
        ended = sum(count for _, count in self._ended)
        return max(SOONEST, min(LATEST, math.ceil(elapsed * sequences / ended)))

    def _refuse(self, message: str, sequences: int) -> None:
        self.refused += 1
        # Not 503: the worker is well, and a gateway's circuit breaker shall not take it out.
        raise ApiError(
            429, message, code="overloaded", kind="rate_limit_error", retry_after=self.retry_after(sequences)
        )
