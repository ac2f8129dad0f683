"""One JSON line per API call, when asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

if TYPE_CHECKING:
    from moonpool_worker.server.generation import Generation

_log = structlog.get_logger()


def log_request(call: Generation, seconds: float, ttft: float | None) -> None:
    """``seconds`` from arrival to end, ``ttft`` to the first token (None: there was none)."""
    prompt_tokens, generated = call.tokens
    cached = call.cached
    _log.info(
        "request",
        id=call.id,
        outcome=call.outcome,
        choices=len(call.choices),
        ttft=None if ttft is None else round(ttft, 4),
        seconds=round(seconds, 4),
        prompt_tokens=prompt_tokens,
        completion_tokens=generated,
        l1_tokens=cached.l1,
        l2_tokens=cached.l2,
        l3_tokens=cached.l3,
        cache_hit_rate=round(cached.total / prompt_tokens, 4) if prompt_tokens else 0.0,
        preemptions=sum(choice.request.preemptions for choice in call.choices),
    )
