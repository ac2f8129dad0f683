"""Answers of the operations' routes, without a process."""

from __future__ import annotations

import json
from types import SimpleNamespace
from unittest.mock import AsyncMock, Mock

from moonpool_worker.cache.stats import CacheStats
from moonpool_worker.server import operations_routes


async def test_cache_statistics_with_reasons_can_be_told() -> None:
    stats = CacheStats()
    stats.l1_evictions["room"] = 2
    stats.store.get_errors["-704"] = 1
    worker = Mock(refresh_cache_stats=AsyncMock(return_value=stats))
    request = Mock(app=SimpleNamespace(state=SimpleNamespace(worker=worker)))
    answer = await operations_routes.cache_stats(request)
    body = json.loads(bytes(answer.body))
    assert body["l1_evictions"] == {"room": 2}
    assert body["store"]["get_errors"] == {"-704": 1}
