"""What is told about every sequence when it is over, with TokenSpeed's fields and one per tier."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass

import structlog

from moonpool_worker.cache.stats import TierTokens
from moonpool_worker.engine.request import Request

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class RequestStats:
    """Durations in milliseconds, rates from 0 to 1, ``*_ts`` in seconds since 1970; 0 for what did not happen.

    ``status``: finished or aborted; ``reason``: stop, length, or why it was aborted. ``queue_ms`` ends with the
    admission and includes ``fetch_ms``, the wait for L3. ``prefill_ms``: from there to the first token. ``preempt_*``:
    the request gave its blocks back because L1 was full. ``l3``: how its look into L3 ended, or why there was none.
    """

    status: str
    reason: str
    prompt_tokens: int
    cache_tokens: int
    cache_tokens_l1: int
    cache_tokens_l2: int
    cache_tokens_l3: int
    output_tokens: int
    cache_hit_rate: float
    queue_ms: float
    fetch_ms: float
    prefill_ms: float
    ttft_ms: float
    total_ms: float
    preempt_ms: float
    preempt_count: int
    decode_tps: float
    recv_ts: float
    commit_ts: float
    finish_ts: float
    l3: str

    @classmethod
    def of(cls, request: Request, outcome: str) -> RequestStats:
        """``outcome``: of the API call, when the sequence did not end by itself."""
        line = request.timeline
        now = time.monotonic()
        cached = request.cached or TierTokens()
        generated = request.generated
        decoding = line.last_token - line.first_token
        own_end = request.finish_reason is not None and request.finish_reason.value != "abort"
        return cls(
            status="finished" if own_end else "aborted",
            reason=request.finish_reason.value if own_end and request.finish_reason is not None else outcome,
            prompt_tokens=request.prompt_tokens,
            cache_tokens=cached.total,
            cache_tokens_l1=cached.l1,
            cache_tokens_l2=cached.l2,
            cache_tokens_l3=cached.l3,
            output_tokens=generated,
            cache_hit_rate=round(cached.total / request.prompt_tokens, 4),
            queue_ms=_milliseconds((line.first_admitted or now) - line.received),
            fetch_ms=_milliseconds(line.fetch_seconds),
            prefill_ms=_milliseconds(line.first_token - line.first_admitted) if line.first_token else 0.0,
            ttft_ms=_milliseconds(line.first_token - line.received) if line.first_token else 0.0,
            total_ms=_milliseconds(now - line.received),
            preempt_ms=_milliseconds(line.preempt_seconds),
            preempt_count=line.preemptions,
            decode_tps=round((generated - 1) / decoding, 1) if decoding > 0 else 0.0,
            recv_ts=round(line.epoch(line.received), 3),
            commit_ts=round(line.epoch(line.first_admitted), 3),
            finish_ts=round(time.time(), 3),
            l3=request.l3_reason,
        )

    def log(self, call: str, index: int) -> None:
        """One JSON line: the API call's id, the number of the choice, and every field."""
        _log.info("request", id=call, index=index, **asdict(self))


def _milliseconds(seconds: float) -> float:
    return round(seconds * 1000, 2)
