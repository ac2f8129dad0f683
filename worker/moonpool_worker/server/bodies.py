"""Bodies of /v1/completions and /v1/chat/completions, checked."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

import msgspec
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    PlainValidator,
    ValidationError,
    model_validator,
)

from moonpool_worker.server.errors import ApiError
from moonpool_worker.server.neutral import take_out

_MAX_STOPS = 4
#: What a seed may be, as OpenAI says it: a signed 64-bit integer.
_SEED = 2**63


def _stops(value: Any) -> Any:
    if isinstance(value, list) and len(value) > _MAX_STOPS:
        raise ValueError(f"no more than {_MAX_STOPS} stop strings, not {len(value)}")
    return [value] if isinstance(value, str) else value


def _join_text_parts(value: Any) -> Any:
    """Content as a list of parts becomes one text; parts that are not text are refused."""
    if not isinstance(value, list):
        return value
    texts = []
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ValueError('only parts of the form {"type": "text", "text": "…"} are supported')
        texts.append(part["text"])
    return "".join(texts)


def _prompt(value: Any) -> Any:
    """By hand: a union collects an error for each item and each member, which takes a minute for a million items."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        if _all_are(int, value) or _all_are(str, value):
            return value
        if all(isinstance(item, list) and _all_are(int, item) for item in value):
            return value
    raise ValueError("must be a string, a list of strings, a list of token ids or a list of those")


def _all_are(kind: type, values: list[Any]) -> bool:
    # Not isinstance: true is no token id.
    return all(type(value) is kind for value in values)


class _Body(BaseModel):
    # Strict: "5" is not a number here either, as with OpenAI; pydantic still takes 1 for 1.0.
    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(_Body):
    model_config = ConfigDict(extra="ignore", strict=True)

    include_usage: bool | None = False


class SamplingBody(_Body):
    """What both calls have in common. None means the default, as with OpenAI."""

    model: str | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1)
    seed: int | None = Field(default=None, ge=-_SEED, lt=_SEED)
    n: int | None = Field(default=None, ge=1, le=128)
    stop: Annotated[list[str] | None, BeforeValidator(_stops)] = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    cache_salt: str | None = Field(default=None, max_length=1024)

    @property
    def choices(self) -> int:
        return self.n or 1

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @model_validator(mode="after")
    def _stream_options_need_stream(self) -> SamplingBody:
        # Gateways send null or an empty object without a stream; an explicit wish is a mistake.
        if self.include_usage and not self.stream:
            raise ValueError("stream_options may only be set when stream is true")
        return self


class CompletionBody(SamplingBody):
    prompt: Annotated[str | list[int] | list[str] | list[list[int]], PlainValidator(_prompt)]
    logprobs: int | None = Field(default=None, ge=0, le=20)
    best_of: int | None = Field(default=None, ge=1)

    @property
    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            return []
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)


class Message(_Body):
    """One message; ``content`` is text."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str | None, BeforeValidator(_join_text_parts)] = None
    name: str | None = None
    refusal: None = None
    tool_calls: list[Any] | None = Field(default=None, max_length=0)

    @model_validator(mode="after")
    def _has_content(self) -> Message:
        if self.content is None and self.role != "assistant":
            raise ValueError("content is missing")
        return self


class ChatBody(SamplingBody):
    messages: Annotated[list[Message], FailFast()] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)

    @model_validator(mode="after")
    def _top_logprobs_need_logprobs(self) -> ChatBody:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs to be true")
        return self


B = TypeVar("B", bound=SamplingBody)


def parse(model: type[B], raw: bytes) -> B:
    """The body of a request. Raises ApiError 400 that names the field at fault."""
    try:
        tree = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as failure:
        raise ApiError(400, f"the body is not valid JSON: {failure}", code="invalid_json") from failure
    if not isinstance(tree, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    if model is CompletionBody and tree.get("logprobs") is False:
        # The gateway adds chat's default to completions too.
        del tree["logprobs"]
    known = frozenset(model.model_fields)
    try:
        body = model.model_validate(take_out(tree, known))
    except ValidationError as failure:
        raise _explain(failure) from failure
    _check_best_of(body)
    return body


def _check_best_of(body: SamplingBody) -> None:
    if isinstance(body, CompletionBody) and body.best_of not in (None, 1, body.choices):
        raise ApiError(
            400,
            "'best_of' other than 'n' is not supported by this server",
            param="best_of",
            code="unsupported_parameter",
        )


def _explain(failure: ValidationError) -> ApiError:
    errors = failure.errors(include_url=False, include_input=False)
    # A union reports each of its members: the error that got deepest into the body is the telling one.
    error = max(errors, key=lambda each: sum(isinstance(part, int) for part in each["loc"]))
    path = [part for part in error["loc"] if isinstance(part, int) or part.isidentifier()]
    if path and path[0] == "stop":
        path = path[:1]
    param = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".") or None
    message = error["msg"].removeprefix("Value error, ")
    if param is None and message.startswith(("stream_options", "top_logprobs")):
        param = message.split(" ", 1)[0]
    code = "missing_required_parameter" if error["type"] == "missing" else "invalid_value"
    return ApiError(400, f"{param}: {message}" if param else message, param=param, code=code)
