"""Is L3 faster than computing? Three measured rates, and the two times that follow from them."""

from __future__ import annotations

#: What a sample leaves of those before it: the rates follow a change within some ten calls.
_DECAY = 0.9


class _Rate:
    """Amount per second, over samples that fade. Long ones count more than short ones."""

    def __init__(self) -> None:
        self._amount = self._seconds = 0.0

    def add(self, amount: float, seconds: float) -> None:
        self._amount = _DECAY * self._amount + amount
        self._seconds = _DECAY * self._seconds + seconds

    @property
    def value(self) -> float:
        """0 as long as nothing was measured."""
        return self._amount / self._seconds if self._seconds > 0 else 0.0


class Rates:
    """``latency``: seconds of a store call besides the bytes; 0 until it was measured, as all others are."""

    def __init__(self) -> None:
        self._bandwidth = _Rate()
        self._prefill = _Rate()
        self.latency = 0.0

    def forget_store(self) -> None:
        """Another store, or the same one after an outage: its rates are unknown again."""
        self._bandwidth = _Rate()
        self.latency = 0.0

    def measured_latency(self, seconds: float) -> None:
        self.latency = seconds if not self.latency else _DECAY * self.latency + (1 - _DECAY) * seconds

    def measured_read(self, nbytes: int, seconds: float) -> None:
        """One read, of which ``latency`` is not the bytes' share."""
        self._bandwidth.add(nbytes, max(seconds - self.latency, seconds / 10))

    def measured_prefill(self, tokens: int, seconds: float) -> None:
        self._prefill.add(tokens, seconds)

    @property
    def bandwidth(self) -> float:
        """Bytes per second that the store delivers to L2."""
        return self._bandwidth.value

    @property
    def prefill(self) -> float:
        """Prompt tokens per second that the engine computes."""
        return self._prefill.value

    def fetch_seconds(self, nbytes: int) -> float | None:
        """For a look-up and a read of ``nbytes``; None when the store has not been measured."""
        return 2 * self.latency + nbytes / self.bandwidth if self.bandwidth else None

    def compute_seconds(self, tokens: int) -> float | None:
        """None when the engine has computed nothing yet."""
        return tokens / self.prefill if self.prefill else None

    def cheaper(self, nbytes: int, tokens: int) -> bool:
        """Whether ``nbytes`` from L3 are there sooner than ``tokens`` are computed. True when that is not known yet.

        A fetch that turns out slow teaches the rates, a fetch that is never tried teaches nothing.
        """
        fetch, compute = self.fetch_seconds(nbytes), self.compute_seconds(tokens)
        return fetch is None or compute is None or fetch < compute
