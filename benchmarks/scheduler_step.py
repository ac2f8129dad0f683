"""How long does it take to plan a step with 256 running requests over 100,000 cached blocks?

The same load for Moonpool's scheduler and for TokenSpeed's (PyPI ``tokenspeed-scheduler``, C++), without a model: each
step's tokens are just appended. L1 is full of other texts' blocks, so every new block evicts one. Each step 256
requests decode; when one ends, another takes its place with a prompt of which half is cached. A step is planning it and
taking its results in (``schedule`` and ``computed``; ``next_execution_plan`` and ``advance``), with L2 and L3 off.

Times are of the thread's processor, so that a busy machine does not show as slow planning.

``step_ms_p50``, ``step_ms_p99``: ours. ``ratio_tokenspeed``: its median step by ours, above 1 when ours is shorter;
the two run in turns of ``--turn`` steps.

``uv run python -m benchmarks.scheduler_step``
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Iterator
from typing import Any, Protocol

from moonpool_api.geometry import full_attention
from moonpool_worker.cache.device_arena import DeviceArena
from moonpool_worker.cache.kv_cache import KVCache
from moonpool_worker.engine.request import Output, Request
from moonpool_worker.engine.scheduler import Scheduler

from benchmarks.harness.report import Report, say

PAGE = 16
PROMPT = 512
ANSWER = (64, 192)
BUDGET = 2048


class Nobody:
    """Where outputs go."""

    def put(self, index: int, output: Output) -> None: ...

    def push(self, token_id: int) -> tuple[str, bool]:
        return "", False

    def finish(self) -> str:
        return ""


class Load:
    """Prompts and lengths of answers, the same for everybody: ``beginnings`` are cached, what follows never is."""

    def __init__(self, seed: int, beginnings: int) -> None:
        self._chance = random.Random(seed)
        self._beginnings = [self._tokens(PROMPT // 2) for _ in range(beginnings)]

    def _tokens(self, count: int) -> list[int]:
        return [self._chance.randrange(100_000) for _ in range(count)]

    def fillers(self, blocks: int) -> Iterator[list[int]]:
        """Texts that fill so many blocks, and the cached beginnings last."""
        for _ in range(blocks * PAGE // PROMPT):
            yield self._tokens(PROMPT)
        for beginning in self._beginnings:
            yield [*beginning, *self._tokens(PAGE)]

    def next(self) -> tuple[list[int], int]:
        prompt = [*self._chance.choice(self._beginnings), *self._tokens(PROMPT // 2)]
        return prompt, self._chance.randint(*ANSWER)


class Planner(Protocol):
    @property
    def running(self) -> int: ...

    def submit(self, prompt: list[int], answer: int) -> None: ...

    def step(self) -> float:
        """Plan a step and take its results in; the processor's seconds that took."""
        ...


class Moonpool:
    def __init__(self, blocks: int, requests: int) -> None:
        geometry = full_attention(layers=1, kv_heads=1, head_dim=2, dtype="float32", prefix_granularity=PAGE)
        self.cache = KVCache(DeviceArena(geometry, blocks + 1), "0" * 64)
        self._scheduler = Scheduler(self.cache, BUDGET, requests)
        self._names = 0

    @property
    def running(self) -> int:
        return len(self._scheduler)

    def submit(self, prompt: list[int], answer: int) -> None:
        self._names += 1
        self._scheduler.add(Request(str(self._names), list(prompt), answer, Nobody(), Nobody()))

    def step(self) -> float:
        begin = time.thread_time()
        work = self._scheduler.schedule()
        self._scheduler.computed(work)
        seconds = time.thread_time() - begin
        ended = []
        for item in work:
            if item.chunk.wants_logits:
                item.request.token_ids.append(7)
                if item.request.generated >= item.request.max_tokens:
                    ended.append(item.request)
        begin = time.thread_time()
        for request in ended:
            self._scheduler.remove(request)
        return seconds + time.thread_time() - begin


class TokenSpeed:
    def __init__(self, blocks: int, requests: int) -> None:
        import tokenspeed_scheduler

        self._api: Any = tokenspeed_scheduler
        config = self._api.SchedulerConfig()
        config.prefix_granularity = PAGE
        config.num_device_pages = blocks + 1
        config.max_scheduled_tokens = BUDGET
        config.max_batch_size = requests
        config.num_snapshot_pages = 1
        config.disable_l2_cache = True
        config.enable_mixed_prefill_decode = True
        config.cache_groups = [self._api.CacheGroupConfig("full", PAGE, blocks + 1, self._api.AttnKind.Full)]
        self._scheduler = self._api.Scheduler(config)
        self._left: dict[str, int] = {}
        self._pending: dict[str, int] = {}
        self._names = 0

    @property
    def running(self) -> int:
        return len(self._left)

    def submit(self, prompt: list[int], answer: int) -> None:
        self._names += 1
        spec = self._api.RequestSpec()
        spec.request_id, spec.tokens, spec.max_new_tokens = str(self._names), prompt, answer
        self._left[spec.request_id] = answer
        self._pending[spec.request_id] = len(prompt)
        self._scheduler.submit_requests([spec])

    def step(self) -> float:
        begin = time.thread_time()
        plan = self._scheduler.next_execution_plan()
        seconds = time.thread_time() - begin
        event = self._api.ExecutionEvent()
        for batch in plan.forward:
            prompts = batch.num_extends()
            for at, (name, length) in enumerate(zip(batch.request_ids, batch.input_lengths, strict=True)):
                if at < prompts and batch.extend_prefix_lens[at] + length < self._pending[name]:
                    continue
                result = self._api.ForwardEvent.ExtendResult()
                result.request_id, result.tokens = name, [7]
                event.add_event(result)
                self._left[name] -= 1
                if self._left[name] <= 0:
                    finish = self._api.ForwardEvent.Finish()
                    finish.request_id = name
                    event.add_event(finish)
                    del self._left[name], self._pending[name]
        begin = time.thread_time()
        self._scheduler.advance(event)
        return seconds + time.thread_time() - begin


def fill(planner: Planner, load: Load, blocks: int) -> None:
    for prompt in load.fillers(blocks):
        planner.submit(prompt, 1)
        while planner.running:
            planner.step()


def keep_busy(planner: Planner, load: Load, requests: int, steps: int) -> list[float]:
    """Steps with so many requests running; their seconds."""
    seconds = []
    for _ in range(steps):
        while planner.running < requests:
            planner.submit(*load.next())
        seconds.append(planner.step())
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=100_000, help="cached blocks of 16 tokens")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--turn", type=int, default=25, help="steps before the other one's turn")
    options = parser.parse_args()
    report = Report("scheduler_step")
    room = options.blocks + options.requests * (PROMPT + ANSWER[1]) // PAGE
    planners: dict[str, Planner] = {"moonpool": Moonpool(room, options.requests)}
    try:
        planners["tokenspeed"] = TokenSpeed(room, options.requests)
    except ImportError as failure:
        report.add(why=f"tokenspeed-scheduler is not installed: {failure}")
    loads = {name: Load(1, 200) for name in planners}
    for name, planner in planners.items():
        say(f"{name}: filling {room} blocks")
        fill(planner, loads[name], room)
        keep_busy(planner, loads[name], options.requests, 2 * ANSWER[1])
    seconds: dict[str, list[float]] = {name: [] for name in planners}
    for _ in range(options.steps // options.turn):
        for name, planner in planners.items():
            seconds[name] += keep_busy(planner, loads[name], options.requests, options.turn)
    figures = {name: statistics.quantiles(times, n=100) for name, times in seconds.items()}
    ours = figures["moonpool"]
    report.add(
        requests=options.requests,
        cached_blocks=planners["moonpool"].cache.stats().l1_cached_blocks,  # type: ignore[attr-defined]
        step_ms_p50=1000 * ours[49],
        step_ms_p99=1000 * ours[98],
    )
    theirs = figures.get("tokenspeed")
    if theirs is not None:
        report.add(tokenspeed_ms_p50=1000 * theirs[49], tokenspeed_ms_p99=1000 * theirs[98])
    report.add(ratio_tokenspeed=theirs[49] / ours[49] if theirs is not None else None)
    print(report.line())


if __name__ == "__main__":
    main()
