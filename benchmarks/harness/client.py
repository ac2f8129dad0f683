"""The HTTP client that measures every server alike: /v1/completions, streamed, greedy, no retries."""

from __future__ import annotations

import asyncio
import json
import random
import time
from dataclasses import dataclass, field

import httpx

#: Common words, one or two tokens each in most vocabularies.
_WORDS = """
    time year people way day man thing woman life child world school state family student group country problem
    hand part place case week company system program question work government number night point home water room
    mother area money story fact month lot right study book eye job word business issue side kind head house
    service friend father power hour game line end member law car city community name president team minute idea
    body information back parent face others level office door health person art war history party result change
    morning reason research girl guy moment air teacher force education
""".split()  # noqa: SIM905 (a list of a hundred quoted words is worse to read)


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds since sending; ``tokens`` is what the server counted. ``tiers``: cached tokens by tier, of our own."""

    first_token: float
    last_token: float
    tokens: int
    prompt_tokens: int
    cached_tokens: int | None
    text: str = ""
    tiers: dict[str, int] = field(default_factory=dict)


def words(count: int, seed: int) -> str:
    """``count`` words, the same for the same seed. SmolLM2 makes about one token of each."""
    source = random.Random(seed)
    return " ".join(source.choice(_WORDS) for _ in range(count))


async def complete(client: httpx.AsyncClient, model: str, prompt: str | list[int], max_tokens: int) -> Timing:
    """One streamed completion of a text or of token ids. Raises RuntimeError for anything but a whole answer."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    begin = time.perf_counter()
    first = last = 0.0
    usage: dict = {}
    parts: list[str] = []
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        if answer.status_code != 200:
            raise RuntimeError(f"HTTP {answer.status_code}: {(await answer.aread()).decode()[:300]}")
        async for line in answer.aiter_lines():
            if not line.startswith("data:") or line.endswith("[DONE]"):
                continue
            event = json.loads(line[5:])
            if "error" in event:
                raise RuntimeError(f"error in the stream: {event['error']}")
            usage = event.get("usage") or usage
            if event.get("choices"):
                # Only an event that brings a token counts; the closing one may bring none.
                if event["choices"][0].get("text") or not first:
                    parts.append(event["choices"][0].get("text") or "")
                    last = time.perf_counter() - begin
                first = first or last
    details = usage.get("prompt_tokens_details") or {}
    return Timing(
        first,
        last,
        usage.get("completion_tokens", 0),
        usage.get("prompt_tokens", 0),
        details.get("cached_tokens"),
        "".join(parts),
        details.get("moonpool") or {},
    )


async def together(
    client: httpx.AsyncClient, model: str, prompts: list[str], max_tokens: int
) -> tuple[float, list[Timing]]:
    """All prompts at once: seconds until the last one ended, and each one's timing."""
    begin = time.perf_counter()
    timings = await asyncio.gather(*(complete(client, model, prompt, max_tokens) for prompt in prompts))
    return time.perf_counter() - begin, list(timings)
