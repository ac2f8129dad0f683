"""Steady traffic against an OpenAI endpoint, by a client that never retries and believes nothing.

Half of the requests stream. A request counts as failed when it has no complete answer: an HTTP status other than 200,
a broken connection, an ``error`` event inside a stream, or a stream without a finish reason before its end.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import httpx


@dataclass(frozen=True, slots=True)
class Answer:
    """One request's fate. ``seconds`` is from sending to the last byte, ``first_token`` to the first text."""

    started: float
    seconds: float
    first_token: float | None
    streamed: bool
    text: str = ""
    error: str = ""
    fingerprint: str = ""
    prompt_tokens: int = 0
    l1_tokens: int = 0
    l2_tokens: int = 0
    l3_tokens: int = 0
    worker: str = ""

    @property
    def failed(self) -> bool:
        return bool(self.error)

    @property
    def cached_tokens(self) -> int:
        return self.l1_tokens + self.l2_tokens + self.l3_tokens


class BrokenAnswer(Exception):
    """The server said 200 and then did not keep it."""


async def chat(client: httpx.AsyncClient, body: dict, stream: bool) -> Answer:
    """Send one chat completion; never raises for what the server or the network does."""
    started = time.time()
    begin = time.monotonic()
    seen = _Seen()
    error = ""
    try:
        if stream:
            await _stream(client, body, seen, begin)
        else:
            await _plain(client, body, seen, begin)
    except (httpx.HTTPError, BrokenAnswer, ValueError, KeyError, IndexError) as fault:
        error = f"{type(fault).__name__}: {fault}"[:300]
    tiers = (seen.usage.get("prompt_tokens_details") or {}).get("moonpool") or {}
    return Answer(
        started=started,
        seconds=time.monotonic() - begin,
        first_token=seen.first_token,
        streamed=stream,
        text=seen.text,
        error=error,
        fingerprint=seen.fingerprint,
        prompt_tokens=seen.usage.get("prompt_tokens", 0),
        l1_tokens=tiers.get("l1_tokens", 0),
        l2_tokens=tiers.get("l2_tokens", 0),
        l3_tokens=tiers.get("l3_tokens", 0),
        worker=seen.worker,
    )


@dataclass(slots=True)
class _Seen:
    text: str = ""
    first_token: float | None = None
    fingerprint: str = ""
    worker: str = ""
    usage: dict = field(default_factory=dict)


async def _plain(client: httpx.AsyncClient, body: dict, seen: _Seen, begin: float) -> None:
    answer = await client.post("/v1/chat/completions", json=body)
    seen.worker = answer.headers.get("x-smg-routed-worker-id", "")
    if answer.status_code != 200:
        raise BrokenAnswer(f"HTTP {answer.status_code}: {answer.text[:200]}")
    parsed = answer.json()
    choice = parsed["choices"][0]
    if choice.get("finish_reason") not in ("stop", "length"):
        raise BrokenAnswer(f"finish_reason {choice.get('finish_reason')!r}")
    seen.text = choice["message"]["content"]
    seen.first_token = time.monotonic() - begin
    seen.fingerprint = parsed.get("system_fingerprint") or ""
    seen.usage = parsed.get("usage") or {}


async def _stream(client: httpx.AsyncClient, body: dict, seen: _Seen, begin: float) -> None:
    body = body | {"stream": True, "stream_options": {"include_usage": True}}
    finished = done = False
    async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        seen.worker = answer.headers.get("x-smg-routed-worker-id", "")
        if answer.status_code != 200:
            await answer.aread()
            raise BrokenAnswer(f"HTTP {answer.status_code}: {answer.text[:200]}")
        async for line in answer.aiter_lines():
            if not line.startswith("data:"):
                continue
            data = line[5:].strip()
            if data == "[DONE]":
                done = True
                break
            event = json.loads(data)
            if "error" in event:
                raise BrokenAnswer(f"error in the stream: {json.dumps(event['error'])[:200]}")
            seen.fingerprint = event.get("system_fingerprint") or seen.fingerprint
            seen.usage = event.get("usage") or seen.usage
            for choice in event["choices"]:
                if choice["delta"].get("content"):
                    seen.first_token = seen.first_token or time.monotonic() - begin
                    seen.text += choice["delta"]["content"]
                finished = finished or choice.get("finish_reason") in ("stop", "length")
    if not finished or not done:
        raise BrokenAnswer("the stream ended before its answer did")


class Traffic:
    """``concurrency`` clients that send one request after the other until :meth:`stop`."""

    def __init__(
        self,
        url: str,
        prompts: Sequence[list[dict]],
        model: str,
        concurrency: int = 2,
        max_tokens: int = 16,
        pause: float = 0.2,
        on_answer: Callable[[Answer], None] | None = None,
    ) -> None:
        self.answers: list[Answer] = []
        self._url, self._prompts, self._model = url, prompts, model
        self._max_tokens, self._pause, self._on_answer = max_tokens, pause, on_answer
        self._stopping = asyncio.Event()
        self._tasks = [asyncio.create_task(self._client(i)) for i in range(concurrency)]

    async def _client(self, number: int) -> None:
        # A generous read time-out: a slow answer is a measurement, not an error.
        limits = httpx.Timeout(120.0, connect=10.0)
        async with httpx.AsyncClient(base_url=self._url, timeout=limits) as client:
            turn = number
            while not self._stopping.is_set():
                body = {
                    "model": self._model,
                    "messages": self._prompts[turn % len(self._prompts)],
                    "max_tokens": self._max_tokens,
                    "temperature": 0,
                }
                answer = await chat(client, body, stream=turn % 2 == 0)
                self.answers.append(answer)
                if self._on_answer:
                    self._on_answer(answer)
                turn += 1
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), self._pause)

    async def stop(self) -> list[Answer]:
        """Let the requests in flight finish; returns every answer."""
        self._stopping.set()
        await asyncio.gather(*self._tasks)
        return self.answers


@dataclass(frozen=True, slots=True)
class Summary:
    sent: int
    failed: int
    longest: float
    l1_tokens: int
    l2_tokens: int
    l3_tokens: int
    fingerprints: dict[str, int]
    errors: dict[str, int]


def summarize(answers: Sequence[Answer]) -> Summary:
    return Summary(
        sent=len(answers),
        failed=sum(answer.failed for answer in answers),
        longest=max((answer.seconds for answer in answers), default=0.0),
        l1_tokens=sum(answer.l1_tokens for answer in answers),
        l2_tokens=sum(answer.l2_tokens for answer in answers),
        l3_tokens=sum(answer.l3_tokens for answer in answers),
        fingerprints=dict(Counter(answer.fingerprint for answer in answers if not answer.failed)),
        errors=dict(Counter(answer.error for answer in answers if answer.failed)),
    )
