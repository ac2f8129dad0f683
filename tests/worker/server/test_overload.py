"""Too much at once, too slow, gone: what the worker takes on stays bounded, and all of it comes back."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
from moonpool_worker.engine.delivery import OutputStream
from moonpool_worker.engine.request import FinishReason, Output
from moonpool_worker.sampling.params import SamplingParams
from moonpool_worker.server import body_reader
from moonpool_worker.server.body_reader import BodyReader
from moonpool_worker.server.errors import ApiError
from moonpool_worker.server.generation import Generation, Wishes
from moonpool_worker.server.overload import LATEST, MAX_TOKENS, SOONEST, Load
from moonpool_worker.server.silent_clients import drop_silent_clients

from .conftest import WorkerProcess, start


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


# -- limits ------------------------------------------------------------------------------------------------------------


def test_a_full_worker_says_when_to_come_back_at_the_rate_it_works() -> None:
    clock = Clock()
    load = Load(10, clock)
    load.add(10, 1000)
    assert refused(load, 1).retry_after == SOONEST
    for _ in range(4):
        clock.now += 3
        load.remove(1, 100)
        load.add(1, 100)
    clock.now += 3
    assert refused(load, 1).retry_after == 3
    assert refused(load, 4).retry_after == 12
    clock.now += 10_000
    assert refused(load, 10).retry_after == LATEST
    assert load.refused == 4


def refused(load: Load, sequences: int, tokens: int = 0) -> ApiError:
    with pytest.raises(ApiError) as caught:
        load.check(sequences, tokens)
    assert (caught.value.status, caught.value.code) == (429, "overloaded")
    return caught.value


def test_prompts_are_bounded_in_tokens_too_and_what_can_never_fit_is_not_to_be_tried_again() -> None:
    load = Load(10)
    load.check(1, 2 * MAX_TOKENS)
    load.add(1, MAX_TOKENS - 10)
    load.check(1, 10)
    refused(load, 1, 11)
    load.remove(1, MAX_TOKENS - 10)
    assert (load.sequences, load.tokens) == (0, 0)
    with pytest.raises(ApiError) as caught:
        load.check(11)
    assert (caught.value.status, caught.value.retry_after) == (400, None)


# -- bodies ------------------------------------------------------------------------------------------------------------


class Upload:
    """A request whose body comes in pieces."""

    def __init__(self, *pieces: bytes, length: int | None = None, pause: float = 0) -> None:
        self.headers = {} if length is None else {"content-length": str(length)}
        self._pieces, self._pause = pieces, pause

    async def stream(self) -> AsyncIterator[bytes]:
        import asyncio

        for piece in self._pieces:
            yield piece
            await asyncio.sleep(self._pause)


async def test_bodies_are_bounded_one_by_one_and_together(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = BodyReader(max_seconds=0.1)
    assert await reader.read(Upload(b"a", b"b")) == b"ab"  # type: ignore[arg-type]
    large = bytes(body_reader.MAX_BYTES)
    for upload, status in [
        (Upload(large, b"x"), 413),
        (Upload(length=len(large) + 1), 413),
        (Upload(b"a", b"b", pause=1), 408),
    ]:
        with pytest.raises(ApiError) as caught:
            await reader.read(upload)  # type: ignore[arg-type]
        assert caught.value.status == status
        assert reader.held == 0
    reader.held = body_reader.MAX_TOTAL_BYTES
    with pytest.raises(ApiError) as caught:
        await reader.read(Upload(b"a"))  # type: ignore[arg-type]
    assert (caught.value.status, caught.value.retry_after) == (429, 1)
    assert reader.held == body_reader.MAX_TOTAL_BYTES


# -- slow readers ------------------------------------------------------------------------------------------------------


def test_a_stream_nobody_reads_ends_and_holds_no_more() -> None:
    overflows: list[int] = []
    stream = OutputStream(3, lambda: overflows.append(1))
    for number in range(10):
        stream.put(0, Output(str(number)))
    assert overflows == [1]
    stream.put(0, Output("", None, FinishReason.ABORT, "too slow"))
    assert [output.text for _, output in stream._outputs] == ["0", "1", "2", ""]


async def test_a_slow_readers_call_is_aborted_and_told_why() -> None:
    engine, metrics = Mock(), Mock()
    loaded = SimpleNamespace(max_model_len=10_000, tokenizer=Mock(eos_ids=frozenset()))
    worker = Mock(accept=lambda sequences, tokens: (loaded, engine), metrics=metrics)
    call = Generation(worker, "id", [[1, 2]], Wishes(SamplingParams(), 5000))
    sink = call.choices[0].request.sink
    for _ in range(2048):
        sink.put(0, Output("x"))
    engine.abort.assert_not_called()
    sink.put(0, Output("x"))
    reason = engine.abort.call_args.args[1]
    assert "2048 tokens behind" in reason
    sink.put(0, Output("", None, FinishReason.ABORT, reason))
    read = 0
    with pytest.raises(ApiError, match="behind"):
        async for _ in call.outputs():
            read += 1
    assert (read, call.outcome) == (2048, "slow_reader")


def test_the_kernel_ends_a_connection_whose_client_reads_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as client:
        drop_silent_clients(listener, 1.0)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(listener.getsockname())
        server, _ = listener.accept()
        with server:
            server.settimeout(20)
            started = time.monotonic()
            with pytest.raises(TimeoutError) as caught:
                while True:
                    server.sendall(bytes(1 << 16))
            # The kernel's ETIMEDOUT, not Python's own time-out.
            assert caught.value.errno is not None
            assert time.monotonic() - started < 15


# -- the real worker ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small_worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    limits = ["--max-running", "2", "--max-waiting", "1", "--l1-size", "64Mi"]
    worker = start(tmp_path_factory.mktemp("small"), *limits, "--log-request-stats")
    try:
        worker.wait_for("/ready")
        yield worker
    finally:
        worker.process.kill()
        worker.process.wait()


def idle(client: httpx.Client, seconds: float = 15) -> dict[str, Any]:
    """Statistics of the cache when nothing runs, waits or is held any more."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        load = client.get("/v1/loads").json()["loads"][0]
        stats = client.get("/v1/cache/stats").json()
        if not load["num_total_reqs"] and stats["l1_free_blocks"] + stats["l1_evictable_blocks"] == stats["l1_blocks"]:
            return stats
        time.sleep(0.1)
    pytest.fail(f"still there: {load}, {stats}")


class Streams:
    """Endless streams, each on a thread; closing one is a client that goes away."""

    def __init__(self, worker: WorkerProcess) -> None:
        self._worker = worker
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []

    def begin(self, prompt: str, streaming: bool = True, wait: bool = True) -> None:
        begun = threading.Event()
        thread = threading.Thread(target=self._read, args=(prompt, streaming, begun))
        thread.start()
        self._threads.append(thread)
        if wait:
            assert begun.wait(60)

    def _read(self, prompt: str, streaming: bool, begun: threading.Event) -> None:
        body = {"prompt": prompt, "max_tokens": 5000, "ignore_eos": True, "temperature": 0, "stream": streaming}
        if not streaming:
            with self._worker.client(0.5) as client, pytest.raises(httpx.ReadTimeout):
                client.post("/v1/completions", json=body)
            return
        with self._worker.client(60) as client, client.stream("POST", "/v1/completions", json=body) as answer:
            for _ in answer.iter_lines():
                begun.set()
                if self._stop.is_set():
                    return

    def end(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(30)
            assert not thread.is_alive()


@pytest.mark.model
def test_beyond_its_limits_a_worker_answers_429_and_all_that_was_held_comes_back(small_worker: WorkerProcess) -> None:
    streams = Streams(small_worker)
    with small_worker.client() as client:
        for number in range(2):
            streams.begin(f"Story number {number}:")
        streams.begin("The one that waits", streaming=True, wait=False)
        deadline = time.monotonic() + 10
        while client.get("/v1/loads").json()["loads"][0]["num_waiting_reqs"] < 1:
            assert time.monotonic() < deadline
        answer = client.post("/v1/completions", json={"prompt": "one too many", "max_tokens": 1})
        assert answer.status_code == 429
        assert SOONEST <= int(answer.headers["retry-after"]) <= LATEST
        assert answer.json()["error"]["code"] == "overloaded"
        assert client.get("/health").status_code == client.get("/ready").status_code == 200
        streams.end()
        idle(client)
        assert client.post("/v1/completions", json={"prompt": "again", "max_tokens": 1}).status_code == 200
        text = client.get("/metrics").text
        assert "moonpool:requests_overloaded_total 1.0" in text
        assert 'moonpool:requests_total{outcome="refused"} 1.0' in text


@pytest.mark.model
def test_clients_that_go_away_leave_nothing_running_waiting_or_unread(small_worker: WorkerProcess) -> None:
    streams = Streams(small_worker)
    with small_worker.client() as client:
        for number in range(2):
            streams.begin(f"Story number {number}:")
        # Neither streaming nor running: it waits for room, and its client gives up after half a second.
        streams.begin("Nobody reads this", streaming=False, wait=False)
        time.sleep(1.5)
        streams.end()
        idle(client)
    lines = list(request_lines(small_worker))[-3:]
    assert [line["status"] for line in lines] == ["aborted"] * 3
    assert {line["reason"] for line in lines} == {"client_gone"}
    waiting = next(line for line in lines if not line["commit_ts"])
    assert (waiting["output_tokens"], waiting["ttft_ms"]) == (0, 0)


def request_lines(worker: WorkerProcess) -> Iterator[dict[str, Any]]:
    for line in worker.log.read_text().splitlines():
        if line.startswith("{") and (record := json.loads(line)).get("event") == "request":
            yield record
