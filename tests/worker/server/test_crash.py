"""An engine that is killed comes back in its container, with its L2, and without the operator."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import httpx
import pytest
from moonpool_api import names
from moonpool_worker.server.podinfo import write_annotations

from .conftest import StartWorker, WorkerProcess

pytestmark = pytest.mark.model

PROMPT = [100 + place * 37 % 5000 for place in range(400)]
#: Whole pages of 16 tokens before the last token.
REUSABLE = 384


def engine_of(worker: WorkerProcess) -> int:
    pid = worker.process.pid
    (engine,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(engine)


def crash(worker: WorkerProcess) -> None:
    """Kill the engine and wait until the next one is loaded."""
    killed = engine_of(worker)
    os.kill(killed, signal.SIGKILL)
    deadline = time.monotonic() + 30
    while True:
        assert time.monotonic() < deadline
        try:
            if engine_of(worker) != killed:
                break
        except ValueError:
            pass  # between two engines
        time.sleep(0.02)
    worker.wait_for("/v1/cache/namespace")


def ask(client: httpx.Client) -> tuple[str, dict[str, int]]:
    answer = client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 12, "temperature": 0})
    assert answer.status_code == 200, answer.text
    body = answer.json()
    return body["choices"][0]["text"], body["usage"]["prompt_tokens_details"]["moonpool"]


def memory_of(worker: WorkerProcess) -> Path:
    """The memfd that the supervisor keeps."""
    folder = Path(f"/proc/{worker.process.pid}/fd")
    (found,) = [link for link in folder.iterdir() if "moonpool-l2" in os.readlink(link)]
    return found


def test_killed_engine_finds_its_l2_and_is_ready_without_the_operator(
    start_worker: StartWorker, tmp_path: Path
) -> None:
    podinfo = tmp_path / "podinfo"
    write_annotations(podinfo, {})
    worker = start_worker("--podinfo", str(podinfo), "--dtype", "float32")
    report = worker.wait_for("/v1/cache/namespace").json()
    write_annotations(podinfo, {names.ANNOTATION_VERIFIED_NAMESPACE: report["namespace"]})
    worker.wait_for("/ready")
    with worker.client() as client:
        text, tiers = ask(client)
        assert tiers == {"l1_tokens": 0, "l2_tokens": 0, "l3_tokens": 0}
        streamed = client.build_request(
            "POST", "/v1/completions", json={"prompt": "x", "max_tokens": 5000, "ignore_eos": True, "stream": True}
        )
        answer = client.send(streamed, stream=True)
        lines = answer.iter_lines()
        next(lines)
        crash(worker)
        # What was being answered ends in an error, not in silence or in what looks like an end.
        with pytest.raises(httpx.TransportError):
            for line in lines:
                assert "[DONE]" not in line
    with worker.client() as client:
        again = client.get("/v1/cache/namespace").json()
        assert again["namespace"] == report["namespace"]
        assert again["boot"] != report["boot"]
        assert ask(client) == (text, {"l1_tokens": 0, "l2_tokens": REUSABLE, "l3_tokens": 0})
        # The gateway is given the time to see that it was gone.
        assert client.get("/ready").json()["reason"] == "Returning"
        worker.wait_for("/ready", timeout=15)
    assert worker.end() == 0


def test_restored_pages_are_checked_before_use(start_worker: StartWorker) -> None:
    worker = start_worker("--dtype", "float32")
    worker.wait_for("/ready")
    with worker.client() as client:
        text, _ = ask(client)
    with memory_of(worker).open("r+b", buffering=0) as memory:
        size = os.fstat(memory.fileno()).st_size
        found = memory.read(64 << 20).find(b"MOONKVB1", 1 << 20)
        assert 0 < found < size
        # One byte in the payload of a page that is neither the first nor the last.
        memory.seek(found + 5000)
        byte = memory.read(1)
        memory.seek(found + 5000)
        memory.write(bytes([byte[0] ^ 1]))
    crash(worker)
    with worker.client() as client:
        answer, tiers = ask(client)
        assert answer == text
        assert 0 < tiers["l2_tokens"] < REUSABLE
        assert client.get("/v1/cache/stats").json()["header_mismatches"] == {"l2.checksum": 1}
