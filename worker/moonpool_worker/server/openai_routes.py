"""/v1/completions, /v1/chat/completions and /v1/models."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from moonpool_worker.cache.extra_keys import frame_keys
from moonpool_worker.engine.loading import Loaded
from moonpool_worker.engine.request import Output
from moonpool_worker.sampling.params import SamplingParams
from moonpool_worker.server import prompts
from moonpool_worker.server.bodies import ChatBody, CompletionBody, SamplingBody, parse
from moonpool_worker.server.disconnect import ClientGone, unless_gone
from moonpool_worker.server.errors import json_response
from moonpool_worker.server.formats import ChatFormat, CompletionFormat, Format
from moonpool_worker.server.generation import Generation, Wishes
from moonpool_worker.server.streaming import EventStream
from moonpool_worker.server.worker import Worker

router = APIRouter()

#: OpenAI's default for completions; a chat goes on to the end of the context.
_COMPLETION_TOKENS = 16
#: Colder is greedy: logits divided by less would leave the range of float32.
_COLDEST = 1e-5
#: What nginx logs for a client that closed: nobody reads it.
_CLIENT_GONE = 499


@router.post("/v1/completions")
async def completions(request: Request) -> Response:
    worker: Worker = request.app.state.worker
    body = parse(CompletionBody, await worker.bodies.read(request))
    worker.require_model(body.model)
    loaded, _ = worker.accept(1)
    wishes = _wishes(body, body.max_tokens or _COMPLETION_TOKENS, body.logprobs)
    tokens = await prompts.completion_prompts(body, loaded)
    call = Generation(worker, f"cmpl-{uuid.uuid4().hex}", tokens, wishes)
    form = CompletionFormat(worker.model_name, fingerprint(loaded), loaded.tokenizer.token_text)
    return await _answer(request, body, call, form)


@router.post("/v1/chat/completions")
async def chat_completions(request: Request) -> Response:
    worker: Worker = request.app.state.worker
    body = parse(ChatBody, await worker.bodies.read(request))
    worker.require_model(body.model)
    loaded, _ = worker.accept(1)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    wishes = _wishes(body, body.max_completion_tokens or body.max_tokens, logprobs)
    tokens = [await prompts.chat_prompt(body, loaded)]
    call = Generation(worker, f"chatcmpl-{uuid.uuid4().hex}", tokens, wishes)
    form = ChatFormat(worker.model_name, fingerprint(loaded), loaded.tokenizer.token_text)
    return await _answer(request, body, call, form)


@router.get("/v1/models")
async def models(request: Request) -> Response:
    worker: Worker = request.app.state.worker
    loaded, _ = worker.require_loaded()
    return json_response({"object": "list", "data": [_model(worker, loaded)]})


@router.get("/v1/models/{name:path}")
async def model(request: Request, name: str) -> Response:
    worker: Worker = request.app.state.worker
    loaded, _ = worker.require_loaded()
    worker.require_model(name)
    return json_response(_model(worker, loaded))


def fingerprint(loaded: Loaded) -> str:
    """Tells which weights answered: the beginning of the KV namespace."""
    return loaded.namespace[:16]


def _model(worker: Worker, loaded: Loaded) -> dict[str, Any]:
    return {
        "id": worker.model_name,
        "object": "model",
        "created": worker.started,
        "owned_by": "moonpool",
        "root": worker.model_name,
        "max_model_len": loaded.max_model_len,
    }


def _wishes(body: SamplingBody, max_tokens: int | None, logprobs: int | None) -> Wishes:
    temperature = 1.0 if body.temperature is None else body.temperature
    sampling = SamplingParams(
        temperature=temperature if temperature >= _COLDEST else 0.0,
        top_p=1.0 if body.top_p is None else body.top_p,
        # -1 is how several servers say "off".
        top_k=max(body.top_k or 0, 0),
        seed=body.seed,
        logprobs=logprobs,
    )
    return Wishes(
        sampling=sampling,
        max_tokens=max_tokens,
        n=body.choices,
        stops=tuple(body.stop or ()),
        ignore_eos=bool(body.ignore_eos),
        salt=frame_keys([("cache_salt", (body.cache_salt or "").encode())]),
    )


async def _answer(request: Request, body: SamplingBody, call: Generation, form: Format) -> Response:
    call.start()
    outputs = call.outputs()
    streaming = False
    try:
        # A stream begins with its first token: what fails before can still be a status, which a gateway may retry.
        first = await unless_gone(request, _next(outputs))
        if body.stream:
            streaming = True
            return EventStream(call, form, first, outputs, body.include_usage)
        await unless_gone(request, _exhaust(outputs))
    except ClientGone:
        return Response(status_code=_CLIENT_GONE)
    finally:
        if not streaming:
            call.close()
    whole = form.head(call, chunk=False)
    return json_response(whole | {"choices": [form.choice(c) for c in call.choices], "usage": call.usage()})


async def _next(outputs: AsyncIterator[tuple[int, Output]]) -> tuple[int, Output]:
    return await anext(outputs)


async def _exhaust(outputs: AsyncIterator[tuple[int, Output]]) -> None:
    async for _ in outputs:
        pass
