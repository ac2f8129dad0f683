"""What the worker's processes hold: weights, the configured tiers, and no more than 700 MB besides."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import httpx
import pytest

from .conftest import StartWorker, WorkerProcess

pytestmark = [pytest.mark.model, pytest.mark.slow]

OVERHEAD = 700 * 10**6
L1 = L2 = 128 << 20


def process_tree(pid: int) -> list[int]:
    children = [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]
    return [pid, *(each for child in children for each in process_tree(child))]


def held(pid: int) -> int:
    """Bytes of anonymous and shared memory; a page shared within the tree is counted by its parts."""
    total = 0
    for each in process_tree(pid):
        for line in Path(f"/proc/{each}/smaps_rollup").read_text().splitlines():
            name, _, value = line.partition(":")
            if name in ("Pss_Anon", "Pss_Shmem"):
                total += int(value.split()[0]) * 1024
    return total


def weights_bytes(worker: WorkerProcess) -> int:
    loaded = [line for line in worker.log.read_text().splitlines() if '"event": "loaded"' in line]
    return json.loads(loaded[0])["weights_bytes"]


async def load(worker: WorkerProcess) -> None:
    """Twelve prompts of 1,500 tokens, six at a time: more than L1 and L2 can hold."""
    gate = asyncio.Semaphore(6)
    async with httpx.AsyncClient(base_url=worker.url, timeout=300) as client:

        async def one(number: int) -> None:
            prompt = [100 + (number * 31 + place * 7) % 5000 for place in range(1500)]
            async with gate:
                answer = await client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 8})
                assert answer.status_code == 200

        await asyncio.gather(*map(one, range(12)))


async def test_memory_after_load_and_under_load(start_worker: StartWorker) -> None:
    worker = start_worker("--l1-size", str(L1), "--l2-size", str(L2))
    worker.wait_for("/ready")
    limit = weights_bytes(worker) + L1 + L2 + OVERHEAD
    idle = held(worker.process.pid)
    await load(worker)
    busy = held(worker.process.pid)
    print(f"held: {idle / 1e6:.0f} MB after load, {busy / 1e6:.0f} MB after work, limit {limit / 1e6:.0f} MB")
    assert idle < limit
    assert busy < limit
