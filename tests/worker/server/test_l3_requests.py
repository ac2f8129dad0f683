"""Requests of a real worker with a real Mooncake: what their statistics say, and what is left when the client goes."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.mooncake_fixture import MiB, RunningMooncake, available, running_mooncake

from .conftest import StartWorker, WorkerProcess

pytestmark = [
    pytest.mark.model,
    pytest.mark.mooncake,
    pytest.mark.skipif(not available(), reason="Mooncake is not installed"),
]

TENANT, PAGE = "statistics", 16
PROMPT = [3000 + 7 * place for place in range(12 * PAGE + 5)]
#: Without a patience of its own, a request would be computed before its client could go away.
PATIENT = ["--prefetch-always", "--prefetch-timeout-base", "12s"]


@pytest.fixture
def fleet(start_worker: StartWorker) -> Iterator[tuple[WorkerProcess, RunningMooncake]]:
    with running_mooncake({TENANT: 100 * MiB}, 128 * MiB) as mooncake:
        worker = start_worker("--l3-master", mooncake.master, "--l3-tenant", TENANT, "--log-request-stats", *PATIENT)
        worker.wait_for("/ready")
        with worker.client() as client:
            until(lambda: stats(client)["store_state"] == "open")
        yield worker, mooncake


def until(done: Any, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def stats(client: httpx.Client) -> dict[str, Any]:
    return client.get("/v1/cache/stats").json()


def ask(client: httpx.Client, **options: Any) -> dict[str, Any]:
    body = {"prompt": PROMPT, "max_tokens": 3, "temperature": 0, "ignore_eos": True}
    return client.post("/v1/completions", json=body, **options).json()


def last_line(worker: WorkerProcess) -> dict[str, Any]:
    lines = (line for line in worker.log.read_text().splitlines() if line.startswith("{"))
    return [record for line in lines if (record := json.loads(line)).get("event") == "request"][-1]


def test_a_request_says_what_came_from_l3_and_its_end_frees_it_while_it_waits(
    fleet: tuple[WorkerProcess, RunningMooncake],
) -> None:
    worker, mooncake = fleet
    with worker.client() as client:
        assert ask(client)["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        cold = last_line(worker)
        assert (cold["status"], cold["reason"], cold["output_tokens"]) == ("finished", "length", 3)
        assert (cold["prompt_tokens"], cold["cache_tokens"], cold["cache_hit_rate"]) == (len(PROMPT), 0, 0)
        assert 0 <= cold["queue_ms"] <= cold["ttft_ms"] <= cold["total_ms"]
        assert abs(cold["queue_ms"] + cold["prefill_ms"] - cold["ttft_ms"]) < 1
        assert cold["recv_ts"] <= cold["commit_ts"] <= cold["finish_ts"] <= time.time() + 1
        assert cold["decode_tps"] > 0
        assert cold["l3"] in ("absent", "few pages")
        until(lambda: not stats(client)["put_queue"])

        client.post("/v1/cache/flush", json={})
        details = ask(client)["usage"]["prompt_tokens_details"]["moonpool"]
        warm = last_line(worker)
        assert warm["cache_tokens_l3"] == details["l3_tokens"] == warm["cache_tokens"] == 12 * PAGE
        assert (warm["cache_tokens_l1"], warm["cache_tokens_l2"], warm["l3"]) == (0, 0, "complete")
        assert 0 < warm["fetch_ms"] <= warm["queue_ms"]
        assert warm["cache_hit_rate"] == round(12 * PAGE / len(PROMPT), 4)
        assert "moonpool:l3_wait_seconds_count" in client.get("/metrics").text

        client.post("/v1/cache/flush", json={})
        for name in mooncake.processes:
            mooncake.signal(name, signal.SIGSTOP)
        try:
            with pytest.raises(httpx.ReadTimeout):
                ask(client, timeout=1.5)
            # It waited for L3, neither running nor streaming, when its client went away.
            until(lambda: not client.get("/v1/loads").json()["loads"][0]["num_total_reqs"], 5)
            left = stats(client)
            assert (left["fetches_active"], left["l1_used_blocks"], left["admitted"]) == (0, 0, 2)
            assert all(group["l2_pages"] == group["l2_idle_pages"] for group in left["groups"])
            gone = last_line(worker)
            assert (gone["status"], gone["reason"], gone["output_tokens"]) == ("aborted", "client_gone", 0)
            assert gone["fetch_ms"] > 500
        finally:
            for name in mooncake.processes:
                mooncake.signal(name, signal.SIGCONT)
