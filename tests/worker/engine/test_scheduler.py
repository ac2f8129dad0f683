"""The scheduler over a real cache of tiny blocks; the model is imagined: each step's tokens are just appended."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from moonpool_api.geometry import full_attention
from moonpool_worker.cache.device_arena import DeviceArena
from moonpool_worker.cache.kv_cache import KVCache
from moonpool_worker.engine.request import FinishReason, Output, Request, State
from moonpool_worker.engine.scheduler import Scheduler, Work

PAGE = 4


class Nothing:
    def put(self, index: int, output: Output) -> None: ...

    def push(self, token_id: int) -> tuple[str, bool]:
        return "", False

    def finish(self) -> str:
        return ""


def make_cache(blocks: int, **options: object) -> KVCache:
    geometry = full_attention(layers=1, kv_heads=1, head_dim=2, dtype="float32", prefix_granularity=PAGE)
    return KVCache(DeviceArena(geometry, blocks + 1), "ab" * 32, **options)  # type: ignore[arg-type]


def make_request(name: str, prompt: list[int], max_tokens: int = 4) -> Request:
    return Request(name, list(prompt), max_tokens, Nothing(), Nothing())


@dataclass
class Machine:
    """Runs steps; ``log`` has (request, start, tokens) of each step's chunks."""

    scheduler: Scheduler
    log: list[list[tuple[str, int, int]]] = field(default_factory=list)

    def step(self) -> list[Work]:
        work = self.scheduler.schedule()
        self.log.append([(item.request.id, item.chunk.start, len(item.chunk.token_ids)) for item in work])
        for item in work:
            assert len(item.chunk.tables[0]) * PAGE >= item.chunk.end
        self.scheduler.computed(work)
        for item in work:
            request = item.request
            if not item.chunk.wants_logits:
                continue
            request.token_ids.append(1000 + len(request.token_ids))
            if request.generated >= request.max_tokens:
                request.finish_reason = FinishReason.LENGTH
                self.scheduler.remove(request)
        return work

    def run(self, limit: int = 500) -> None:
        for _ in range(limit):
            if not len(self.scheduler):
                return
            self.step()
        pytest.fail(f"not finished after {limit} steps")

    def computed_tokens(self, name: str) -> int:
        return sum(tokens for step in self.log for who, _, tokens in step if who == name)


def machine(blocks: int = 64, budget: int = 16, running: int = 8, **options: object) -> Machine:
    return Machine(Scheduler(make_cache(blocks, **options), budget, running))


def test_long_prompt_is_computed_in_chunks_that_end_at_pages() -> None:
    m = machine(budget=10)
    m.scheduler.add(make_request("a", list(range(21)), max_tokens=1))
    m.run()
    assert m.log == [[("a", 0, 8)], [("a", 8, 8)], [("a", 16, 5)]]


def test_decode_goes_before_prefill_in_the_same_step() -> None:
    m = machine(budget=10)
    m.scheduler.add(make_request("a", [1, 2, 3], max_tokens=5))
    m.step()
    m.scheduler.add(make_request("b", list(range(50, 70))))
    m.step()
    assert m.log[1] == [("a", 3, 1), ("b", 0, 8)]


def test_no_more_than_max_running_and_first_come_first_served() -> None:
    m = machine(running=2)
    for name in "abc":
        m.scheduler.add(make_request(name, [ord(name)] * 3, max_tokens=2))
    m.step()
    assert [request.id for request in m.scheduler.running] == ["a", "b"]
    m.run()
    assert m.log[2] == [("c", 0, 3)]


def test_shared_prefix_is_computed_once() -> None:
    m = machine(budget=8)
    shared = list(range(32))
    for number, name in enumerate("abcd"):
        m.scheduler.add(make_request(name, [*shared, 100 + number, 200 + number], max_tokens=1))
    m.run()
    assert m.computed_tokens("a") == 34
    assert [m.computed_tokens(name) for name in "bcd"] == [2, 2, 2]


def test_waiting_for_a_shared_prefix_holds_up_nobody_else() -> None:
    m = machine(budget=12)
    shared = list(range(32))
    m.scheduler.add(make_request("a", [*shared, 100]))
    m.scheduler.add(make_request("b", [*shared, 101], max_tokens=1))
    m.step()
    m.scheduler.add(make_request("c", [7, 7, 7]))
    m.run()
    first_step = {who: min(n for n, step in enumerate(m.log) if who in [item[0] for item in step]) for who in "bc"}
    assert first_step["c"] < first_step["b"]
    assert m.computed_tokens("b") == 1


def test_followers_go_on_alone_when_the_first_is_aborted() -> None:
    m = machine(budget=8)
    shared = list(range(32))
    first = make_request("a", [*shared, 100])
    m.scheduler.add(first)
    m.scheduler.add(make_request("b", [*shared, 101], max_tokens=1))
    m.step()
    m.scheduler.remove(first)
    m.run()
    # The first chunk was published before the abort.
    assert m.computed_tokens("b") == 33 - 8


def test_without_prefix_caching_nobody_waits() -> None:
    m = machine(prefix_caching=False)
    for name in "ab":
        m.scheduler.add(make_request(name, [1] * 8, max_tokens=1))
    m.step()
    assert len(m.log[0]) == 2


def test_youngest_is_preempted_and_finishes_later() -> None:
    m = machine(blocks=6, budget=32)
    m.scheduler.add(make_request("a", [1] * 8, max_tokens=12))
    m.scheduler.add(make_request("b", [2] * 8, max_tokens=12))
    m.run()
    assert m.scheduler.preemptions >= 1
    last = [step for step in m.log if step][-1]
    assert last[0][0] == "b"


def test_prompt_that_can_never_fit_is_refused_at_once() -> None:
    m = machine(blocks=4)
    with pytest.raises(ValueError, match="do not fit in L1"):
        m.scheduler.add(make_request("a", [1] * 16))
    m.scheduler.add(make_request("b", [1] * 15, max_tokens=1))
    m.run()


def test_budget_smaller_than_the_running_requests_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot hold"):
        machine(budget=4, running=8)


@pytest.mark.parametrize("seed", range(20))
def test_random_load_always_ends_and_gives_everything_back(seed: int) -> None:
    chance = random.Random(seed)
    m = machine(blocks=12, budget=16, running=6, l2_bytes=1 << 16)
    alive: list[Request] = []
    for number in range(40):
        prompt = [chance.randrange(3)] * chance.randrange(1, 24) + [chance.randrange(3) for _ in range(8)]
        request = make_request(str(number), prompt, max_tokens=chance.randrange(1, 12))
        m.scheduler.add(request)
        alive.append(request)
        for _ in range(chance.randrange(3)):
            m.step()
        if chance.random() < 0.2:
            m.scheduler.remove(chance.choice(alive))
    m.run(2000)
    assert all(request.state is State.FINISHED for request in alive)
    assert not m.scheduler._in_flight
    cache = m.scheduler._cache
    assert cache.available_blocks == cache.usable_blocks
