"""A server in a process of its own, its log in a file, ended with everything that it started."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx


class CouldNotRun(Exception):
    """Why a server is not measured; goes into the report as ``why``."""


@dataclass(frozen=True, slots=True)
class Server:
    url: str
    model: str
    pid: int
    started: float


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def serving(
    command: Sequence[str], port: int, model: str, ready: str, timeout: float, env: dict[str, str] | None = None
) -> Iterator[Server]:
    """Run ``command`` until the block ends. Raises CouldNotRun when ``ready`` is not 200 within ``timeout`` seconds."""
    started = time.perf_counter()
    with tempfile.NamedTemporaryFile("w+b", suffix=".log", prefix="moonpool-bench-") as log:
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            env=os.environ | (env or {}),
            start_new_session=True,
        )
        url = f"http://127.0.0.1:{port}"
        try:
            _wait(process, url + ready, timeout, Path(log.name))
            yield Server(url, model, process.pid, started)
        finally:
            _end(process)


def _wait(process: subprocess.Popen[bytes], url: str, timeout: float, log: Path) -> None:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise CouldNotRun(f"ended with exit code {process.returncode}: {_tail(log)}")
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(url, timeout=5).status_code == 200:
                return
        time.sleep(0.05)
    raise CouldNotRun(f"not ready within {timeout:.0f} s: {_tail(log)}")


def _tail(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return " | ".join(lines[-3:])[-500:]


def _end(process: subprocess.Popen[bytes]) -> None:
    # The whole process group, which this process made: vLLM leaves an engine process behind otherwise.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(20)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
