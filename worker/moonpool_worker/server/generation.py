"""One API call on its way through the engine: its choices, its usage, and its end."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from moonpool_worker.cache.stats import TierTokens
from moonpool_worker.engine.delivery import OutputStream
from moonpool_worker.engine.engine import EngineDead
from moonpool_worker.engine.request import FinishReason, Output, Request
from moonpool_worker.engine.text import StoppableText
from moonpool_worker.sampling.params import SamplingParams
from moonpool_worker.sampling.sampler import SampledToken
from moonpool_worker.server.errors import ApiError, unavailable
from moonpool_worker.server.request_log import RequestStats

if TYPE_CHECKING:
    from moonpool_worker.server.worker import Worker


#: Tokens of a choice that may wait for a client that reads slowly; what the network buffers comes on top.
_BACKLOG = 2048


@dataclass(frozen=True, slots=True)
class Wishes:
    """What a body says about generation, the same for both calls. ``max_tokens`` None: up to the context's end."""

    sampling: SamplingParams
    max_tokens: int | None
    n: int = 1
    stops: tuple[str, ...] = ()
    ignore_eos: bool = False
    salt: bytes = b""


@dataclass(slots=True)
class Choice:
    """``tokens`` are kept only when log probabilities are wanted."""

    request: Request
    parts: list[str] = field(default_factory=list)
    tokens: list[SampledToken] = field(default_factory=list)
    finish_reason: str | None = None
    last_token_at: float = 0.0

    @property
    def text(self) -> str:
        return "".join(self.parts)


class Generation:
    """``prompts`` times ``wishes.n`` sequences; choice ``i`` belongs to prompt ``i // n``.

    Use :meth:`start`, iterate :meth:`outputs` to its end, and always :meth:`close`.
    """

    def __init__(self, worker: Worker, call_id: str, prompts: list[list[int]], wishes: Wishes) -> None:
        self.id = call_id
        self.created = int(time.time())
        self.outcome = "client_gone"
        self.wishes = wishes
        self._worker = worker
        #: Every copy of a prompt is a list of its own.
        self.queued_tokens = wishes.n * sum(map(len, prompts))
        self._loaded, self._engine = worker.accept(len(prompts) * wishes.n, self.queued_tokens)
        self._stream = OutputStream(_BACKLOG * len(prompts) * wishes.n, self._too_slow)
        self._arrived = time.monotonic()
        self._first_token_at = 0.0
        self._prompt_tokens = sum(map(len, prompts))
        self._generated = 0
        self._over = False
        self.choices = [
            Choice(self._request(prompt, index * wishes.n + copy, copy))
            for index, prompt in enumerate(prompts)
            for copy in range(wishes.n)
        ]

    def start(self) -> None:
        """Hand everything to the engine. Raises ApiError 503."""
        self._worker.enter(self)
        try:
            self._engine.submit([choice.request for choice in self.choices])
        except EngineDead as failure:
            self.outcome = "error"
            self.close()
            raise unavailable("the engine has died; the worker is about to restart", "engine_dead") from failure

    async def outputs(self) -> AsyncIterator[tuple[int, Output]]:
        """``(choice, output)`` as they are made. Raises ApiError when the engine gave up on a choice."""
        left = len(self.choices)
        metrics = self._worker.metrics
        keep_tokens = self.wishes.sampling.logprobs is not None
        while left:
            index, output = await self._stream.get()
            choice = self.choices[index]
            if output.finish_reason is FinishReason.ABORT:
                if self.outcome not in ("cut", "slow_reader"):
                    self.outcome = "error"
                raise ApiError(503, output.error or "the request was aborted", kind="server_error", code="aborted")
            now = time.monotonic()
            if choice.last_token_at:
                metrics.itl.observe(now - choice.last_token_at)
            elif not self._first_token_at:
                self._first_token_at = now
                metrics.ttft.observe(now - self._arrived)
            choice.last_token_at = now
            self._generated += 1
            if output.text:
                choice.parts.append(output.text)
            if keep_tokens and output.token is not None and output.token.token_id not in choice.request.stop_ids:
                choice.tokens.append(output.token)
            if output.finish_reason is not None:
                choice.finish_reason = output.finish_reason.value
                left -= 1
                if not left:
                    # Before the last output is handed on: who reads no further has had everything.
                    self._over = True
                    self.outcome = "success"
            yield index, output

    def cut(self, reason: str) -> None:
        """End the call now with an error that the client sees."""
        self.outcome = "cut"
        self._engine.abort(self.id, reason)

    def _too_slow(self) -> None:
        self.outcome = "slow_reader"
        self._engine.abort(self.id, f"the client is more than {_BACKLOG} tokens behind in reading its stream")

    def close(self) -> None:
        """Free what is left in the engine and write the call into metrics and log. Twice is once."""
        if self not in self._worker.active:
            return
        if not self._over:
            self._engine.abort(self.id, "the client went away")
        self._worker.leave(self)
        metrics = self._worker.metrics
        metrics.requests.labels(self.outcome).inc()
        metrics.prompt_tokens.inc(self._prompt_tokens)
        metrics.generation_tokens.inc(self._generated)
        seconds = time.monotonic() - self._arrived
        metrics.e2e.observe(seconds)
        for choice in self.choices:
            stats = RequestStats.of(choice.request, self.outcome)
            metrics.observe_request(stats)
            if self._worker.settings.log_request_stats:
                stats.log(self.id, choice.request.index)

    @property
    def cached(self) -> TierTokens:
        """Prompt tokens that came from the cache, by tier; of the first choice of each prompt."""
        total = TierTokens()
        for choice in self.choices[:: self.wishes.n]:
            cached = choice.request.cached
            if cached is not None:
                total = TierTokens(total.l1 + cached.l1, total.l2 + cached.l2, total.l3 + cached.l3)
        return total

    @property
    def tokens(self) -> tuple[int, int]:
        """Prompt tokens and generated tokens so far."""
        return self._prompt_tokens, self._generated

    def usage(self) -> dict[str, Any]:
        cached = self.cached
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self._generated,
            "total_tokens": self._prompt_tokens + self._generated,
            "prompt_tokens_details": {
                "cached_tokens": cached.total,
                "moonpool": {"l1_tokens": cached.l1, "l2_tokens": cached.l2, "l3_tokens": cached.l3},
            },
        }

    def _request(self, prompt: list[int], index: int, copy: int) -> Request:
        wishes, loaded = self.wishes, self._loaded
        sampling = wishes.sampling
        if copy and sampling.seed is not None:
            sampling = SamplingParams(
                sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed + copy, sampling.logprobs
            )
        room = loaded.max_model_len - len(prompt)
        return Request(
            id=self.id,
            token_ids=list(prompt),
            max_tokens=min(wishes.max_tokens or room, room),
            sink=self._stream,
            text=StoppableText(loaded.tokenizer.stream_decoder(), wishes.stops),
            sampling=sampling,
            index=index,
            stop_ids=frozenset() if wishes.ignore_eos else loaded.tokenizer.eos_ids,
            salt=wishes.salt,
        )
