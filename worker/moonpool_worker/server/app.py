"""The ASGI application: routes, errors in OpenAI's form, and headers on every answer."""

from __future__ import annotations

import structlog
from fastapi import FastAPI, Request
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moonpool_worker.server import openai_routes, operations_routes
from moonpool_worker.server.errors import ApiError
from moonpool_worker.server.worker import Worker

_log = structlog.get_logger()


def build_app(worker: Worker) -> FastAPI:
    app = FastAPI(title="Moonpool worker", openapi_url=None)
    app.state.worker = worker
    app.include_router(openai_routes.router)
    app.include_router(operations_routes.router)
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _unforeseen)
    app.add_middleware(_Headers, worker=worker)
    return app


class _Headers:
    """Says which namespace answered, and gives the request's id back. Pure ASGI: streams pass through untouched."""

    def __init__(self, app: ASGIApp, worker: Worker) -> None:
        self._app = app
        self._worker = worker

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = next((value for name, value in scope["headers"] if name == b"x-request-id"), None)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                if self._worker.loaded is not None:
                    headers["x-moonpool-namespace"] = self._worker.loaded.namespace
                if request_id is not None:
                    message["headers"].append((b"x-request-id", request_id))
            await send(message)

        await self._app(scope, receive, send_with_headers)


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    if request.url.path in ("/v1/completions", "/v1/chat/completions") and error.code != "aborted":
        request.app.state.worker.metrics.requests.labels("refused").inc()
    return error.response()


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"there is no {request.method} {request.url.path} here" if error.status_code == 404 else error.detail
    return ApiError(error.status_code, str(message), code="not_found" if error.status_code == 404 else None).response()


async def _unforeseen(request: Request, error: Exception) -> Response:
    _log.error("request failed", path=request.url.path, error=f"{type(error).__name__}: {error}")
    return ApiError(500, f"{type(error).__name__}: {error}", kind="server_error", code="internal_error").response()
