"""Server-sent events, one per token."""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from moonpool_worker.engine.request import Output
from moonpool_worker.server.errors import ApiError
from moonpool_worker.server.formats import Format
from moonpool_worker.server.generation import Generation

_encode = msgspec.json.Encoder().encode
DONE = b"data: [DONE]\n\n"


def event(body: object) -> bytes:
    return b"data: " + _encode(body) + b"\n\n"


class EventStream(StreamingResponse):
    """The stream of ``call``, from its ``first`` output on; the call is closed at the end, however that comes."""

    def __init__(
        self,
        call: Generation,
        form: Format,
        first: tuple[int, Output],
        rest: AsyncIterator[tuple[int, Output]],
        include_usage: bool,
    ) -> None:
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(
            _events(call, form, first, rest, include_usage), headers=headers, media_type="text/event-stream"
        )
        self._call = call

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            # Also when the client was gone before the first event, so that the generator never ran.
            self._call.close()


async def _events(
    call: Generation,
    form: Format,
    first: tuple[int, Output],
    rest: AsyncIterator[tuple[int, Output]],
    include_usage: bool,
) -> AsyncIterator[bytes]:
    """An error in mid-stream is an event with ``error`` and no [DONE] after it: nobody shall take it for success."""
    head = form.head(call, chunk=True)
    tail = {"usage": None} if include_usage else {}
    sent = [0] * len(call.choices)

    def piece(index: int, output: Output) -> bytes:
        choice = call.choices[index]
        if not output.text and output.finish_reason is None:
            # Within a character, or what may become a stop string: its log probabilities go with the next piece.
            return b""
        # Only what came with this output or before: the engine may be ahead of the client.
        tokens = choice.tokens[sent[index] :]
        sent[index] = len(choice.tokens)
        finish = output.finish_reason.value if output.finish_reason else None
        return event(head | {"choices": [form.piece(choice, output.text, tokens, finish)]} | tail)

    try:
        opening = (form.first(choice.request.index) for choice in call.choices)
        yield b"".join(event(head | {"choices": [each]} | tail) for each in opening if each is not None) + piece(*first)
        async for index, output in rest:
            if chunk := piece(index, output):
                yield chunk
        if include_usage:
            yield event(head | {"choices": [], "usage": call.usage()})
        yield DONE
    except ApiError as failure:
        yield event(failure.body())
    finally:
        call.close()
