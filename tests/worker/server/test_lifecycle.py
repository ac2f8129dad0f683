"""From the first moment of a worker process to its exit code."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from moonpool_api import names
from moonpool_worker.server.podinfo import write_annotations

from .conftest import StartWorker, WorkerProcess

pytestmark = pytest.mark.model


def stream(worker: WorkerProcess, tokens: int, lines: list[str]) -> threading.Thread:
    """A stream of ``tokens`` tokens in the background; returns when the first one is there."""
    begun = threading.Event()
    body = {"prompt": "Once upon a time", "max_tokens": tokens, "ignore_eos": True, "stream": True}

    def read() -> None:
        with worker.client() as client, client.stream("POST", "/v1/completions", json=body) as answer:
            for line in answer.iter_lines():
                if line:
                    lines.append(line)
                    begun.set()

    thread = threading.Thread(target=read)
    thread.start()
    assert begun.wait(30)
    return thread


def test_podinfo_verifies_and_drain_finishes_what_runs(start_worker: StartWorker, tmp_path: Path) -> None:
    podinfo = tmp_path / "podinfo"
    write_annotations(podinfo, {})
    worker = start_worker("--podinfo", str(podinfo))
    early = worker.wait_for("/ready", 503).json()
    assert early["reason"] in ("Loading", "NamespaceNotVerified")
    namespace = worker.wait_for("/v1/cache/namespace").json()["namespace"]
    with worker.client() as client:
        assert client.get("/health").status_code == 200
        assert client.get("/ready").json()["reason"] == "NamespaceNotVerified"
        write_annotations(podinfo, {names.ANNOTATION_VERIFIED_NAMESPACE: "0" * 64})
        time.sleep(1.5)
        assert "00000000" in client.get("/ready").json()["message"]
        write_annotations(podinfo, {names.ANNOTATION_VERIFIED_NAMESPACE: namespace})
        worker.wait_for("/ready", 200, timeout=5)

        lines: list[str] = []
        reader = stream(worker, 100, lines)
        answers: list[dict] = []
        drain = threading.Thread(target=lambda: answers.append(worker_drain(worker, 30)))
        drain.start()
        time.sleep(0.5)
        assert client.get("/ready").json()["reason"] == "Draining"
        # Still answered, while the gateway has not noticed.
        assert client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}).status_code == 200
        drain.join(60)
        reader.join(10)
        assert lines[-1] == "data: [DONE]"
        assert answers[0]["state"] == "drained"
        assert (answers[0]["finished"], answers[0]["cut"]) == (2, 0)
        refused = client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})
        assert refused.status_code == 503
        assert refused.headers["retry-after"]
    started = time.monotonic()
    assert worker.end(signal.SIGTERM) == 0
    assert time.monotonic() - started < 3


def worker_drain(worker: WorkerProcess, seconds: float) -> dict:
    with worker.client(90) as client:
        return client.post("/drain", json={"timeout": seconds}).json()


def test_drain_cuts_late_streams_visibly(start_worker: StartWorker) -> None:
    worker = start_worker("--drain-timeout", "1s")
    worker.wait_for("/ready")
    lines: list[str] = []
    reader = stream(worker, 7000, lines)
    started = time.monotonic()
    assert worker.end(signal.SIGTERM) == 0
    assert time.monotonic() - started < 6
    reader.join(10)
    assert "drain timeout" in json.loads(lines[-1].removeprefix("data: "))["error"]["message"]
    assert '"cut": 1' in worker.log.read_text()


def test_second_signal_ends_at_once(start_worker: StartWorker) -> None:
    worker = start_worker()
    worker.wait_for("/ready")
    body = {"prompt": "a", "max_tokens": 7000, "ignore_eos": True, "stream": True}
    with worker.client() as client, client.stream("POST", "/v1/completions", json=body) as answer:
        # Kept: an iterator that is thrown away closes its connection.
        lines = answer.iter_lines()
        next(lines)
        worker.process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        assert worker.process.poll() is None
        worker.end(signal.SIGINT, timeout=5)


def test_model_that_is_not_there(start_worker: StartWorker) -> None:
    worker = start_worker(model="/nowhere/model.gguf")
    assert worker.process.wait(60) == 2
    assert "there is no model at /nowhere/model.gguf" in worker.log.read_text()


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--l1-size", "lots"], "write for example 512Mi"),
        (["--drain-timeout", "soon"], "write for example 90s"),
        (["--max-batch-tokens", "16", "--max-running", "64"], "--max-running 64"),
    ],
)
def test_bad_flags_are_refused_in_a_sentence(flags: list[str], says: str) -> None:
    command = [sys.executable, "-m", "moonpool_worker", "serve", "smollm2", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert says in " ".join(done.stderr.replace("│", " ").split())


def test_drain_command_needs_no_torch_and_no_server() -> None:
    code = (
        "import sys; sys.argv = ['moonpool-worker', 'drain', '--port', '1']\n"
        "from moonpool_worker.cli import main\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code; assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
