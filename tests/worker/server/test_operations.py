"""Answers of the operations' routes, without a process."""

from __future__ import annotations

import json
from types import SimpleNamespace
from unittest.mock import AsyncMock, Mock

import pytest
from moonpool_worker.cache.stats import CacheStats, GroupStats
from moonpool_worker.server import operations_routes
from moonpool_worker.server.errors import ApiError


async def test_cache_statistics_with_reasons_can_be_told() -> None:
    stats = CacheStats()
    stats.l1_evictions["room"] = 2
    stats.store.get_errors["-704"] = 1
    stats.prompt_tokens, stats.hit_tokens.l2, stats.l2_read_bytes, stats.l2_read_seconds = 200, 50, 1000, 0.5
    stats.groups = (GroupStats("full", "history", None, 16, 3, 1, 4, 4),)
    loaded = SimpleNamespace(events=None)
    worker = Mock(refresh_cache_stats=AsyncMock(return_value=stats), require_loaded=lambda: (loaded, None))
    request = Mock(app=SimpleNamespace(state=SimpleNamespace(worker=worker)))
    answer = await operations_routes.cache_stats(request)
    body = json.loads(bytes(answer.body))
    assert body["l1_evictions"] == {"room": 2}
    assert body["store"]["get_errors"] == {"-704": 1}
    assert body["groups"][0]["name"] == "full"
    assert (body["groups"][0]["l1_pages"], body["groups"][0]["l2_idle_pages"]) == (3, 4)
    assert (body["rates"]["hit_rate"], body["rates"]["l2_hit_rate"], body["rates"]["l1_hit_rate"]) == (0.25, 0.25, 0)
    assert body["rates"]["l2_read_bytes_per_s"] == 2000
    assert body["events"] is None


def test_a_body_that_is_nested_too_deep_is_the_clients_mistake() -> None:
    with pytest.raises(ApiError) as caught:
        operations_routes._parse(operations_routes.DrainBody, b'{"timeout":' + b"[" * 100_000 + b"]" * 100_000 + b"}")
    assert caught.value.status == 400
