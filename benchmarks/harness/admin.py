"""What a benchmark asks of our own worker besides completions: its figures, a flush, a crash."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from benchmarks.harness.servers.process import Server


class Admin:
    """Of one worker; ``server.pid`` is its supervisor."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._client = httpx.Client(base_url=server.url, timeout=60)

    def stats(self) -> dict[str, Any]:
        return self._client.get("/v1/cache/stats").raise_for_status().json()

    def namespace(self) -> dict[str, Any]:
        return self._client.get("/v1/cache/namespace").raise_for_status().json()

    def flush(self, *tiers: str) -> None:
        self._client.post("/v1/cache/flush", json={"tiers": tiers}).raise_for_status()

    def wait_for_store(self, state: str = "open", seconds: float = 60) -> None:
        self._wait(lambda: self.stats()["store_state"] == state, f"L3 {state}", seconds)

    def wait_until_written(self, seconds: float = 60) -> None:
        """Every block that was published has reached the store, or was given up."""
        self._wait(lambda: self.stats()["put_queue"] == 0, "puts", seconds)

    def crash(self, seconds: float = 120) -> float:
        """Kill the engine, not its supervisor, and wait for the next one: seconds without a worker."""
        started = time.monotonic()
        os.kill(self.engine_pid, signal.SIGKILL)
        while True:
            try:
                if self._client.get("/ready").status_code == 200:
                    return time.monotonic() - started
            except httpx.HTTPError:
                pass
            if time.monotonic() - started > seconds:
                raise TimeoutError(f"no engine again in {seconds:.0f} s")
            time.sleep(0.05)

    @property
    def engine_pid(self) -> int:
        pid = self._server.pid
        (engine,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return int(engine)

    def _wait(self, done: Callable[[], bool], what: str, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not done():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what}: not in {seconds:.0f} s")
            time.sleep(0.05)
