"""The engine's thread with a model that counts: the next token is one more than the last."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest
import torch
from moonpool_api.geometry import full_attention
from moonpool_worker.cache.device_arena import DeviceArena
from moonpool_worker.cache.kv_cache import KVCache
from moonpool_worker.engine.batch import StepBatch
from moonpool_worker.engine.delivery import OutputStream
from moonpool_worker.engine.engine import Engine, EngineDead
from moonpool_worker.engine.request import FinishReason, Request
from moonpool_worker.engine.scheduler import Scheduler
from moonpool_worker.sampling.params import SamplingParams
from moonpool_worker.sampling.sampler import Sampler

VOCABULARY = 64


class CountingRunner:
    def __init__(self) -> None:
        self.before: Callable[[], None] = lambda: None

    def forward(self, batch: StepBatch) -> torch.Tensor:
        self.before()
        last = [chunk.token_ids[-1] for chunk in batch.chunks if chunk.wants_logits]
        logits = torch.zeros(len(last), VOCABULARY)
        for row, token in enumerate(last):
            logits[row, (token + 1) % VOCABULARY] = 10.0
        return logits


class PlainText:
    def push(self, token_id: int) -> tuple[str, bool]:
        return f"{token_id} ", False

    def finish(self) -> str:
        return ""


@pytest.fixture
def runner() -> CountingRunner:
    return CountingRunner()


@pytest.fixture
async def engine(runner: CountingRunner):
    geometry = full_attention(layers=1, kv_heads=1, head_dim=2, dtype="float32", prefix_granularity=4)
    cache = KVCache(DeviceArena(geometry, 33), "cd" * 32)
    engine = Engine(runner, cache, Sampler(), Scheduler(cache, 16, 4), asyncio.get_running_loop())
    engine.start()
    yield engine
    await asyncio.to_thread(engine.stop)


def request(stream: OutputStream, name: str = "r", prompt: tuple[int, ...] = (1, 2), **options: object) -> Request:
    arguments = {"max_tokens": 3, "sampling": SamplingParams(temperature=0)} | options
    return Request(name, list(prompt), sink=stream, text=PlainText(), **arguments)  # type: ignore[arg-type]


async def collect(stream: OutputStream) -> tuple[str, FinishReason | None, str]:
    text = ""
    while True:
        _, output = await asyncio.wait_for(stream.get(), 5)
        text += output.text
        if output.finish_reason is not None:
            return text, output.finish_reason, output.error


async def test_tokens_arrive_in_order(engine: Engine) -> None:
    stream = OutputStream()
    engine.submit([request(stream)])
    assert await collect(stream) == ("3 4 5 ", FinishReason.LENGTH, "")


async def test_stop_token_ends_without_text(engine: Engine) -> None:
    stream = OutputStream()
    engine.submit([request(stream, stop_ids=frozenset({4}))])
    assert await collect(stream) == ("3 ", FinishReason.STOP, "")


async def test_abort_gives_the_blocks_back(engine: Engine) -> None:
    stream = OutputStream()
    engine.submit([request(stream, max_tokens=100)])
    await stream.get()
    engine.abort("r", "enough")
    _, reason, error = await collect(stream)
    assert (reason, error) == (FinishReason.ABORT, "enough")
    blocks = await asyncio.wrap_future(engine.call(lambda: engine.cache.available_blocks))
    assert blocks == engine.cache.usable_blocks


async def test_impossible_prompt_is_answered(engine: Engine) -> None:
    stream = OutputStream()
    engine.submit([request(stream, prompt=(1,) * 500)])
    _, reason, error = await collect(stream)
    assert reason is FinishReason.ABORT
    assert "do not fit" in error


async def test_death_answers_everybody(engine: Engine, runner: CountingRunner) -> None:
    def explode() -> None:
        raise RuntimeError("out of luck")

    stream = OutputStream()
    runner.before = explode
    engine.submit([request(stream)])
    _, reason, error = await collect(stream)
    assert reason is FinishReason.ABORT
    assert "out of luck" in error
    assert not engine.alive
    with pytest.raises(EngineDead):
        engine.submit([request(OutputStream())])


async def test_idle_engine_does_not_spin(engine: Engine) -> None:
    import time

    await asyncio.sleep(0.1)
    before = time.process_time()
    await asyncio.sleep(0.5)
    assert time.process_time() - before < 0.1


async def test_a_call_that_nobody_waits_for_any_more_does_not_end_the_engine(
    engine: Engine, runner: CountingRunner
) -> None:
    stream, inside, go = OutputStream(), threading.Event(), threading.Event()

    def long_step() -> None:
        inside.set()
        go.wait(5)

    runner.before = long_step
    engine.submit([request(stream)])
    await asyncio.to_thread(inside.wait, 5)
    # A scrape of the metrics that gives up while a step is long.
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.wrap_future(engine.call(lambda: 1)), 0.2)
    go.set()
    assert await collect(stream) == ("3 4 5 ", FinishReason.LENGTH, "")
    assert await asyncio.wrap_future(engine.call(lambda: 2)) == 2
    assert engine.alive
