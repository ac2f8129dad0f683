"""Errors as OpenAI's clients expect them."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.responses import Response


class ApiError(Exception):
    """Answered as ``{"error": {"message", "type", "param", "code"}}``. ``retry_after`` is in seconds."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        kind: str = "invalid_request_error",
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.kind = kind
        self.retry_after = retry_after

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        headers = {} if self.retry_after is None else {"retry-after": str(self.retry_after)}
        return json_response(self.body(), self.status, headers)


def unavailable(message: str, code: str, retry_after: int = 1) -> ApiError:
    """503: another worker, or this one a moment later, can do it."""
    return ApiError(503, message, code=code, kind="service_unavailable", retry_after=retry_after)


def json_response(body: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, headers, "application/json")
