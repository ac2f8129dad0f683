"""What the kubelet, the operator, the gateway and Prometheus ask."""

from __future__ import annotations

import asyncio
import time
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypeVar

import msgspec
from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.responses import Response

from moonpool_worker.cache.stats import CacheStats
from moonpool_worker.engine.engine import EngineDead
from moonpool_worker.server import metrics
from moonpool_worker.server.cache_report import cache_report, rates
from moonpool_worker.server.errors import ApiError, json_response, unavailable
from moonpool_worker.server.podinfo import Grant
from moonpool_worker.server.worker import Worker

router = APIRouter()


class GrantBody(BaseModel):
    model_config = ConfigDict(strict=True)

    namespace: str
    tenant: str = ""
    master: str = ""


class FlushBody(BaseModel):
    model_config = ConfigDict(strict=True)

    tiers: list[str] = Field(default_factory=lambda: ["l1", "l2"])


class DrainBody(BaseModel):
    timeout: float | None = Field(default=None, ge=0)


B = TypeVar("B", bound=BaseModel)


@router.get("/health")
async def health(request: Request) -> Response:
    worker: Worker = request.app.state.worker
    if worker.dead:
        return json_response({"status": "dead", "message": worker.dead}, 503)
    return json_response({"status": "ok"})


@router.get("/ready")
async def ready(request: Request) -> Response:
    verdict = request.app.state.worker.readiness.check()
    return json_response(verdict.body(), 200 if verdict.ready else 503)


@router.get("/version")
async def worker_version(request: Request) -> Response:
    return json_response({"version": installed_version()})


@router.get("/metrics")
async def prometheus(request: Request) -> Response:
    worker: Worker = request.app.state.worker
    await worker.refresh_cache_stats()
    return Response(worker.metrics.render(), media_type=metrics.CONTENT_TYPE)


@router.get("/v1/cache/namespace")
async def namespace(request: Request) -> Response:
    worker: Worker = request.app.state.worker
    loaded = worker.loaded
    pod = {"name": worker.settings.pod.name, "uid": worker.settings.pod.uid}
    if loaded is None:
        return json_response(
            {"state": "loading", "message": worker.progress, "boot": worker.boot, "pod": pod}, 503, {"retry-after": "1"}
        )
    return json_response(
        {
            "state": "loaded",
            "namespace": loaded.namespace,
            "inputs": loaded.inputs.model_dump(mode="json"),
            "weights_digest": loaded.inputs.weights_digest,
            "boot": worker.boot,
            "pod": pod,
            "l3": await _l3(worker),
            "capacity": {
                "bytes_per_token": loaded.inputs.geometry.bytes_per_token,
                "l1_tokens": loaded.l1_tokens,
                "l2_tokens": loaded.l2_tokens,
            },
        }
    )


@router.post("/v1/cache/grant")
async def grant(request: Request) -> Response:
    worker: Worker = request.app.state.worker
    body = _parse(GrantBody, await worker.bodies.read(request))
    loaded, _ = worker.require_loaded()
    if body.namespace != loaded.namespace:
        raise ApiError(
            409,
            f"this worker's namespace is {loaded.namespace}, not {body.namespace}",
            param="namespace",
            code="namespace_mismatch",
        )
    await worker.grants.nudge(Grant(body.namespace, body.tenant, body.master))
    return json_response({"l3": await _l3(worker)})


@router.post("/v1/cache/flush")
async def flush(request: Request) -> Response:
    worker: Worker = request.app.state.worker
    body = _parse(FlushBody, await worker.bodies.read(request))
    _, engine = worker.require_loaded()
    tiers = set(body.tiers)
    try:
        flushed = await asyncio.wrap_future(engine.call(lambda: engine.cache.flush(tiers)))
    except ValueError as failure:
        raise ApiError(400, str(failure), param="tiers", code="invalid_value") from failure
    except EngineDead as failure:
        raise unavailable(str(failure), "engine_dead") from failure
    return json_response({"l1_blocks": 0, "l2_blocks": 0} | flushed)


@router.get("/v1/cache/stats")
async def cache_stats(request: Request) -> Response:
    worker: Worker = request.app.state.worker
    loaded, _ = worker.require_loaded()
    stats = await worker.refresh_cache_stats()
    return json_response(cache_report(stats or CacheStats(), loaded.events))


@router.post("/drain")
async def drain(request: Request) -> Response:
    worker: Worker = request.app.state.worker
    body = _parse(DrainBody, await worker.bodies.read(request) or b"{}")
    timeout = worker.settings.drain_timeout if body.timeout is None else body.timeout
    report = await worker.drain.run(timeout)
    return json_response(report.body())


@router.get("/v1/loads")
@router.get("/loads")
async def loads(request: Request) -> Response:
    """How busy the worker is, as the gateway's load monitor wants it."""
    worker: Worker = request.app.state.worker
    loaded, engine = worker.require_loaded()
    stats = engine.stats
    cache = await worker.refresh_cache_stats()
    used = round(rates(cache)["l1_usage"] * loaded.l1_tokens) if cache else 0
    load = {
        "dp_rank": 0,
        "num_running_reqs": stats.running,
        "num_waiting_reqs": stats.waiting,
        "num_total_reqs": stats.running + stats.waiting,
        "num_used_tokens": used,
        "max_total_num_tokens": loaded.l1_tokens,
        "token_usage": round(used / loaded.l1_tokens, 4),
        "gen_throughput": 0.0,
        "cache_hit_rate": rates(cache)["hit_rate"] if cache else 0.0,
        "utilization": round(stats.running / worker.settings.max_running, 4),
        "max_running_requests": worker.settings.max_running,
    }
    return json_response({"timestamp": time.time(), "dp_rank_count": 1, "loads": [load]})


def installed_version() -> str:
    try:
        return version("moonpool")
    except PackageNotFoundError:
        return "0.0.0"


async def _l3(worker: Worker) -> dict[str, Any]:
    state = await worker.grants.state()
    return {"state": state.state, "tenant": state.tenant, "master": state.master, "error": state.error}


def _parse(model: type[B], raw: bytes) -> B:
    try:
        return model.model_validate(msgspec.json.decode(raw))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as failure:
        raise ApiError(400, f"the body is not valid JSON: {failure}", code="invalid_json") from failure
    except ValidationError as failure:
        error = failure.errors(include_url=False, include_input=False)[0]
        param = ".".join(map(str, error["loc"])) or None
        message = f"{param}: {error['msg']}" if param else "the body must be a JSON object"
        raise ApiError(400, message, param=param, code="invalid_value") from failure
