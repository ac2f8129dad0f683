"""The scheduler over caches with several groups, with an imagined model that checks all it reads."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from moonpool_api.geometry import GroupGeometry
from moonpool_worker.cache.kv_cache import KVCache
from moonpool_worker.engine.batch import SequenceChunk
from moonpool_worker.engine.request import Output, Request, State
from moonpool_worker.engine.scheduler import Scheduler

from tests.worker.cache.groups_machine import GROUPS
from tests.worker.cache.imagined_model import P, audit, cache_of, contents, full, state, window


class Nothing:
    def put(self, index: int, output: Output) -> None: ...

    def push(self, token_id: int) -> tuple[str, bool]:
        return "", False

    def finish(self) -> str:
        return ""


def make_request(name: str, prompt: list[int], max_tokens: int = 1) -> Request:
    return Request(name, list(prompt), max_tokens, Nothing(), Nothing())


@dataclass
class Machine:
    """Runs steps; ``log`` has (request, start, tokens) of each step's chunks."""

    cache: KVCache
    budget: int = 16
    running: int = 8
    log: list[list[tuple[str, int, int]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.cache, self.budget, self.running)

    def step(self) -> None:
        work = self.scheduler.schedule()
        assert sum(len(item.chunk.token_ids) for item in work) <= self.budget
        self.log.append([(item.request.id, item.chunk.start, len(item.chunk.token_ids)) for item in work])
        # As in a forward pass: everything is read as it was before the step, or by its own request.
        for item in work:
            self._read(item.request.token_ids, item.chunk)
        for item in work:
            self._write(item.request.token_ids, item.chunk)
        self.scheduler.computed(work)
        for item in work:
            if item.chunk.wants_logits:
                item.request.token_ids.append(1000 + len(item.request.token_ids))
                if item.request.generated >= item.request.max_tokens:
                    self.scheduler.remove(item.request)

    def run(self, limit: int = 2000) -> None:
        for _ in range(limit):
            if not len(self.scheduler):
                return
            self.step()
        pytest.fail(f"not finished after {limit} steps: {self.log[-3:]}")

    def computed_tokens(self, name: str) -> int:
        return sum(tokens for step in self.log for who, _, tokens in step if who == name)

    def finished_at(self, name: str) -> int:
        return max(number for number, step in enumerate(self.log) if name in [who for who, _, _ in step])

    def _read(self, tokens: list[int], chunk: SequenceChunk) -> None:
        for group in self.cache._device.groups:
            if group.geometry.family == "state":
                slots = chunk.states[group.index]
                assert slots is not None
                self._check(group.index, slots.source, tokens, chunk.start)
                continue
            size = group.geometry.block_tokens
            assert len(chunk.tables[group.index]) * size >= chunk.end
            for at in range(group.passed(chunk.start), -(-chunk.start // size)):
                self._check(group.index, chunk.tables[group.index][at], tokens, min(chunk.start, (at + 1) * size))

    def _check(self, group: int, block: int, tokens: list[int], upto: int) -> None:
        found = self.cache.arena.fields(group)[:, block]
        assert (block == 0) == (upto == 0)
        assert upto == 0 or found.equal(contents(group, tuple(tokens[:upto]), tuple(found.shape)))

    def _write(self, tokens: list[int], chunk: SequenceChunk) -> None:
        for group in self.cache._device.groups:
            if group.geometry.family == "state":
                slots = chunk.states[group.index]
                assert slots is not None
                assert slots.targets[-1][0] == chunk.end
                for position, block in slots.targets:
                    self._fill(group.index, block, tokens, position)
                continue
            size = group.geometry.block_tokens
            for at in range(chunk.start // size, -(-chunk.end // size)):
                self._fill(group.index, chunk.tables[group.index][at], tokens, min(chunk.end, (at + 1) * size))

    def _fill(self, group: int, block: int, tokens: list[int], upto: int) -> None:
        assert block != 0
        part = self.cache.arena.fields(group)[:, block]
        part.copy_(contents(group, tuple(tokens[:upto]), tuple(part.shape)))


def machine(
    *groups: GroupGeometry, parents: int = 64, budget: int = 16, running: int = 8, **options: object
) -> Machine:
    return Machine(cache_of(*(groups or (full(),)), parents=parents, **options), budget, running)


def smallest(groups: tuple[GroupGeometry, ...], tokens: int, chunk: int) -> int:
    """The fewest parents that a text alone fits in."""
    return next(parents for parents in range(1, 200) if cache_of(*groups, parents=parents).fits(tokens, chunk))


# -- fairness --------------------------------------------------------------------------------------------------


def test_short_prompts_do_not_wait_for_a_long_one() -> None:
    m = machine(parents=400, budget=32)
    m.scheduler.add(make_request("long", list(range(1000))))
    m.step()
    for number in range(5):
        m.scheduler.add(make_request(f"short{number}", [5000 + number] * 12))
    m.run()
    assert all(m.finished_at(f"short{number}") <= 5 for number in range(5))


def test_a_long_prompt_keeps_half_of_each_step_among_many_short_ones() -> None:
    m = machine(parents=400, budget=32)
    m.scheduler.add(make_request("long", list(range(640))))
    for number in range(400):
        m.scheduler.add(make_request(f"short{number}", [5000 + number] * 16))
        m.step()
    assert m.finished_at("long") <= 640 // 16 + 1
    m.run()


def test_a_prompt_alone_has_the_whole_step() -> None:
    m = machine(parents=400, budget=32)
    m.scheduler.add(make_request("long", list(range(640))))
    m.run()
    assert len(m.log) == 640 // 32


def test_a_second_long_prompt_gets_its_turn() -> None:
    """While shorter ones keep coming it waits only until the first is through."""
    m = machine(parents=400, budget=32)
    for name in ("first", "second"):
        m.scheduler.add(make_request(name, [ord(name[0])] * 320))
    for number in range(200):
        m.scheduler.add(make_request(f"short{number}", [5000 + number] * 16))
        m.step()
    assert m.finished_at("second") <= 2 * 320 // 16 + 2


def test_prompts_go_on_when_decodes_leave_less_than_a_page() -> None:
    m = machine(parents=100, budget=6, running=6)
    for number in range(5):
        m.scheduler.add(make_request(str(number), [number] * 2, max_tokens=60))
    for _ in range(3):
        m.step()
    m.scheduler.add(make_request("late", [9] * 8))
    for _ in range(12):
        m.step()
    assert m.computed_tokens("late") == 8


# -- several groups --------------------------------------------------------------------------------------------


def test_a_window_group_holds_only_what_it_looks_at() -> None:
    m = machine(full(), window(6), parents=200, budget=8)
    m.scheduler.add(make_request("a", list(range(120)), max_tokens=30))
    most = 0
    while len(m.scheduler):
        m.step()
        if m.scheduler.running:
            allocation = m.scheduler.running[0].allocation
            assert allocation is not None
            most = max(most, sum(block != 0 for block in allocation.tables[1]))
    assert most <= (6 + 8) // P + 2


@pytest.mark.parametrize("groups", [(full(), state()), (full(), window(6), state()), (state("a"), full(), state("b"))])
def test_a_prefix_that_two_texts_share_is_computed_once_behind_the_first_that_parted(
    groups: tuple[GroupGeometry, ...],
) -> None:
    m = machine(*groups, parents=200, budget=64)
    shared = list(range(32))
    texts = {name: [*shared, *[number] * 9] for number, name in enumerate("abc", 100)}
    for name, text in texts.items():
        m.scheduler.add(make_request(name, text))
        m.run()
    # "b" found the rows but no state where it parted from "a", so it made one there; "c" starts from it.
    assert [m.computed_tokens(name) for name in "abc"] == [41, 41, 9]


def test_who_waits_for_another_has_it_keep_the_state_where_the_texts_part() -> None:
    m = machine(full(), state(), parents=200, budget=8)
    shared = list(range(32))
    for number, name in enumerate("abc", 100):
        m.scheduler.add(make_request(name, [*shared, *[number] * 5]))
    m.run()
    assert [m.computed_tokens(name) for name in "abc"] == [37, 5, 5]


def test_a_conversation_goes_on_from_the_end_of_its_last_prompt() -> None:
    m = machine(full(), state(), parents=200, budget=64)
    first = make_request("a", list(range(21)), max_tokens=6)
    m.scheduler.add(first)
    m.run()
    m.scheduler.add(make_request("b", [*first.token_ids, *range(300, 310)]))
    m.run()
    assert m.computed_tokens("b") == len(first.token_ids) + 10 - 20


# -- swapping --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", GROUPS, ids=lambda groups: "+".join(group.name for group in groups))
def test_preempted_requests_go_on_where_they_stopped(groups: tuple[GroupGeometry, ...]) -> None:
    m = machine(*groups, parents=smallest(groups, 48, 64) + 1, budget=64, l2_bytes=1 << 20)
    for number in range(3):
        m.scheduler.add(make_request(str(number), [number] * 12, max_tokens=30))
    m.run()
    assert m.cache.stats().suspended == m.cache.stats().resumed == m.scheduler.preemptions
    # Nothing was computed twice.
    for number in range(3):
        assert m.computed_tokens(str(number)) == 12 + 29


def test_preemption_happens_in_the_swapping_tests() -> None:
    m = machine(full(), parents=12, budget=64, l2_bytes=1 << 20)
    for number in range(3):
        m.scheduler.add(make_request(str(number), [number] * 12, max_tokens=30))
    m.run()
    assert m.cache.stats().resumed >= 1


def test_without_room_in_l2_it_is_computed_again() -> None:
    m = machine(full(), parents=12, budget=64)
    for number in range(3):
        m.scheduler.add(make_request(str(number), [number] * 12, max_tokens=30))
    m.run()
    assert m.scheduler.preemptions >= 1
    assert m.cache.stats().suspended == 0
    assert sum(m.computed_tokens(str(number)) for number in range(3)) > 3 * 41


def test_an_aborted_request_gives_its_slots_back() -> None:
    m = machine(full(), parents=12, budget=64, l2_bytes=1 << 20)
    requests = [make_request(str(number), [number] * 12, max_tokens=30) for number in range(3)]
    for request in requests:
        m.scheduler.add(request)
    while not any(request.suspended for request in requests):
        m.step()
    for request in requests:
        m.scheduler.remove(request)
    host = m.cache._host
    assert host is not None
    audit(host.index, [[]])
    assert all(node.refs == 0 for node in host.index.nodes())
    assert m.cache.available_blocks == m.cache.usable_blocks


# -- everything at once ----------------------------------------------------------------------------------------


@pytest.mark.property
@pytest.mark.parametrize("groups", GROUPS, ids=lambda groups: "+".join(group.name for group in groups))
@pytest.mark.parametrize("l2", [0, 1 << 14, 1 << 18])
def test_random_load_always_ends_and_gives_everything_back(groups: tuple[GroupGeometry, ...], l2: int) -> None:
    for seed in range(3):
        chance = random.Random(seed)
        parents = smallest(groups, 44, 16) + chance.randrange(8)
        m = machine(*groups, parents=parents, running=6, l2_bytes=l2, l2_alignment=64)
        alive: list[Request] = []
        for number in range(30):
            prompt = [chance.randrange(3)] * chance.randrange(1, 24) + [chance.randrange(3) for _ in range(8)]
            alive.append(make_request(str(number), prompt, max_tokens=chance.randrange(1, 12)))
            m.scheduler.add(alive[-1])
            for _ in range(chance.randrange(3)):
                m.step()
            if chance.random() < 0.2:
                m.scheduler.remove(chance.choice(alive))
        m.run()
        assert all(request.state is State.FINISHED for request in alive)
        assert not m.scheduler._in_flight
        audit(m.cache._pool, [[] for _ in groups])
        pools = [m.cache._pool] + ([m.cache._host.index] if m.cache._host else [])
        for pool in pools:
            assert all(node.refs == 0 for node in pool.nodes())
            assert pool._claimable == pool.usable_parents
        m.cache.close()


@pytest.mark.parametrize(
    ("groups", "seed"),
    [
        ((full(layers=8, row=64), window(9)), 3),
        ((full(), state(size=16)), 7),
        ((full(layers=4, row=32), window(6), state()), 3),
    ],
    ids=["window", "state", "both"],
)
def test_what_the_cache_holds_never_keeps_out_a_text_that_fits(groups: tuple[GroupGeometry, ...], seed: int) -> None:
    """Pages of a hit that lie in many parents bind them all to their group: the last request waited forever."""
    chance, longest = random.Random(seed), 60
    m = machine(*groups, parents=smallest(groups, longest + 10, 16), l2_bytes=1 << 20)
    base = [chance.randrange(3) for _ in range(longest)]
    for number in range(30):
        cut = chance.randrange(longest)
        prompt = base[:cut] + [chance.randrange(9) for _ in range(chance.randrange(1, longest - cut + 1))]
        m.scheduler.add(make_request(str(number), prompt, max_tokens=chance.randrange(1, 10)))
        if chance.random() < 0.5:
            for _ in range(chance.randrange(4)):
                m.step()
    m.run()
    audit(m.cache._pool, [[] for _ in groups])
