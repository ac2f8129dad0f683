"""When L3 is asked, what it is asked for, and how long it is waited for."""

from __future__ import annotations

from dataclasses import replace

import pytest
from moonpool_api.geometry import GroupGeometry
from moonpool_worker.cache.kv_cache import KVCache
from moonpool_worker.cache.store_tier import fetches, messages
from moonpool_worker.cache.store_tier.options import StoreOptions
from moonpool_worker.cache.store_tier.rates import Rates

from tests.worker.cache.fake_store import FakeL3, Name
from tests.worker.cache.groups_machine import GROUPS
from tests.worker.cache.imagined_model import P, Text, cache_of, full, state, window

PLAIN = StoreOptions(min_pages=2, batch_pages=4)
TOKENS = [*range(1000, 1000 + 8 * P), 7]


def cache(*groups: GroupGeometry) -> KVCache:
    return cache_of(*(groups or (full(),)), parents=64, l2_bytes=1 << 20, l2_alignment=64)


def l3(
    options: StoreOptions = PLAIN,
    objects: dict[Name, bytes] | None = None,
    measured: tuple[int, int] | None = None,
    groups: tuple[GroupGeometry, ...] = (),
) -> FakeL3:
    made = FakeL3(cache(*groups), options, objects, measured)
    made.open()
    return made


def compute(fake: FakeL3, tokens: list[int], fetch: bool = False) -> Text:
    """A text from its look-up to its end; the imagined model checks all that it reads."""
    chain = fake.cache.chain(tokens)
    fetching = fake.cache.start_fetch(chain, len(tokens)) if fetch else None
    fake.settle()
    assert fetching is None or fetching.done
    allocation = fake.cache.admit(chain, len(tokens), fetching)
    assert allocation is not None
    text = Text(fake.cache, tokens, allocation, chain)
    text.check()
    assert text.chunk(len(tokens))
    fake.cache.free(allocation)
    fake.settle()
    return text


def refusal(fake: FakeL3, tokens: list[int] = TOKENS) -> str:
    """Why a text is not looked up in L3."""
    assert fake.cache.start_fetch(fake.cache.chain(tokens), len(tokens)) is None
    assert fake.cache._store is not None
    reason = fake.cache._store.unread
    assert not reason or fake.cache.stats().store.unread[reason] > 0
    return reason


# -- whether -------------------------------------------------------------------------------------------------------


@pytest.fixture
def filled() -> dict[Name, bytes]:
    """What the store has after somebody computed the text."""
    writer = l3()
    compute(writer, TOKENS)
    return writer.objects


def test_a_store_that_is_slower_than_computing_is_left_alone(filled: dict[Name, bytes]) -> None:
    # 1 MiB in a second, and 10 ms for a call: a text of 8 small pages takes more than 20 ms.
    slow = l3(objects=filled, measured=(10_000, 1_000_000))
    assert slow.cache.start_fetch(slow.cache.chain(TOKENS), len(TOKENS)) is not None, "unknown prefill rate: try"
    slow.settle()
    slow.cache.observe_prefill(1000, 0.1)
    slow.cache.flush({"l1", "l2"})
    assert refusal(slow) == "dearer than computing"
    forced = l3(replace(PLAIN, always=True), objects=filled, measured=(10_000, 1_000_000))
    forced.cache.observe_prefill(1000, 0.1)
    assert compute(forced, TOKENS, fetch=True).allocation.cached.l3 == 8 * P


def test_the_same_store_pays_for_an_engine_that_is_slow(filled: dict[Name, bytes]) -> None:
    fake = l3(objects=filled, measured=(10_000, 1_000_000))
    fake.cache.observe_prefill(10, 1.0)
    assert compute(fake, TOKENS, fetch=True).allocation.cached.l3 == 8 * P


def test_a_store_thought_too_slow_is_measured_again(filled: dict[Name, bytes]) -> None:
    fake = l3(objects=filled, measured=(10_000, 1_000_000))
    fake.cache.observe_prefill(1000, 0.1)
    assert refusal(fake) == "dearer than computing"
    assert not fake.process.pending
    fake.now += PLAIN.measure_again
    assert refusal(fake) == "dearer than computing"
    # Now it is fast.
    fake.process._measured = (10, 100)
    fake.settle()
    assert compute(fake, TOKENS, fetch=True).allocation.cached.l3 == 8 * P


def test_the_other_reasons_are_named_and_counted(filled: dict[Name, bytes]) -> None:
    fake = FakeL3(cache(), PLAIN, filled)
    assert refusal(fake) == "closed"
    fake.cache.open_store("a" * 64, "t", "m")
    assert refusal(fake) == "not open"
    fake.settle()
    assert refusal(fake, TOKENS[: P + 1]) == "few pages"
    compute(fake, TOKENS, fetch=True)
    assert refusal(fake, TOKENS) == ""
    other = [9, *TOKENS]
    fetch = fake.cache.start_fetch(fake.cache.chain(other), len(other))
    fake.settle()
    assert fetch is not None
    assert fetch.outcome == "absent"
    assert refusal(fake, other) == "absent"


def test_rates_follow_the_latest_samples() -> None:
    rates = Rates()
    assert rates.cheaper(1 << 40, 1)
    for _ in range(50):
        rates.measured_read(1000, 1.0)
        rates.measured_prefill(10, 1.0)
    assert rates.bandwidth == pytest.approx(1000)
    assert rates.cheaper(999, 10)
    assert not rates.cheaper(1001, 10)
    for _ in range(50):
        rates.measured_read(2000, 1.0)
    assert rates.bandwidth == pytest.approx(2000, rel=0.01)


# -- how long ------------------------------------------------------------------------------------------------------


def test_a_silent_store_is_waited_for_once(filled: dict[Name, bytes]) -> None:
    """Whoever comes after the first that waited in vain is computed at once, until the store answers again."""
    fake = l3(replace(PLAIN, timeout_base=1.0, timeout_per_page=0.1), objects=filled)
    fetch = fake.cache.start_fetch(fake.cache.chain(TOKENS), len(TOKENS))
    assert fetch is not None
    fake.now += 0.4
    fake.process.answer()
    fake.cache.poll()
    fake.now += 0.5 + 8 * 0.1 - 0.01
    fake.cache.poll()
    assert not fetch.done
    fake.now += 0.02
    fake.cache.poll()
    assert fetch.outcome == "deadline"
    # In all no longer than the base and 8 pages.
    assert fetch.deadline - fetch.started <= 1.0 + 8 * 0.1
    assert refusal(fake, TOKENS[: 5 * P + 1]) == "breaker"
    fake.now += PLAIN.breaker_pause
    fake.cache.poll()
    assert refusal(fake, TOKENS[: 5 * P + 1]) == "breaker", "a trial of the worker's own comes first"
    fake.settle()
    fake.cache.drop_fetch(fetch)
    fake.cache.flush({"l1", "l2"})
    assert compute(fake, TOKENS, fetch=True).allocation.cached.l3 == 8 * P


def test_without_a_given_deadline_it_follows_the_rates_and_has_a_limit(filled: dict[Name, bytes]) -> None:
    def waits(measured: tuple[int, int] | None) -> float:
        fake = l3(replace(PLAIN, always=True), objects=filled, measured=measured)
        fetch = fake.cache.start_fetch(fake.cache.chain(TOKENS), len(TOKENS))
        assert fetch is not None
        fake.process.answer()
        fake.cache.poll()
        return fetch.deadline - fetch.started

    fast, unknown, slow = waits((100, 1000)), waits(None), waits((1000, 10**9))
    assert 0.1 < fast < unknown < slow <= PLAIN.timeout_limit


# -- what ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", GROUPS, ids=lambda groups: "+".join(f"{g.name}{g.window or ''}" for g in groups))
def test_all_groups_come_and_nothing_that_is_not_needed(groups: tuple[GroupGeometry, ...]) -> None:
    """A fresh worker hits as far as the one that computed the text would from its own L2, and reads no block more."""
    writer = l3(groups=groups)
    compute(writer, TOKENS)
    writer.cache.flush({"l1"})
    boundary = writer.cache.probe(writer.cache.chain(TOKENS)).blocks
    assert boundary == 8
    reader = l3(objects=writer.objects, groups=groups)
    # Something that takes other parents first, so that slots are not the same.
    compute(reader, list(range(2 * P)))
    reader.process.read.clear()
    text = compute(reader, TOKENS, fetch=True)
    assert text.allocation.cached.l3 == boundary * P
    needed = {
        (group, text.chain[position])
        for group in range(len(groups))
        for position in reader.cache.composition.needs(group, boundary)
    }
    assert set(reader.process.read) == needed
    assert len(reader.process.read) == len(needed)


def test_the_state_behind_the_last_token_is_not_fetched() -> None:
    """A text that ends with a page: its last token is computed, so the hit ends a page before."""
    whole = TOKENS[: 6 * P]
    writer = l3(groups=(full(), state()))
    compute(writer, whole)
    reader = l3(objects=writer.objects, groups=(full(), state()))
    text = compute(reader, whole, fetch=True)
    assert text.allocation.cached.l3 == 5 * P
    assert (1, text.chain[4]) in reader.process.read
    assert (1, text.chain[5]) not in reader.process.read


def test_a_group_that_lacks_a_block_shortens_the_hit_for_all() -> None:
    groups = (full(), window(6))
    writer = l3(groups=groups)
    text = compute(writer, TOKENS)
    # The window of a hit of 8 pages needs the last two of them, one of 5 the fourth and the fifth.
    for position in (6, 7):
        del writer.objects[1, text.chain[position]]
    reader = l3(objects=writer.objects, groups=groups)
    assert compute(reader, TOKENS, fetch=True).allocation.cached.l3 == 6 * P


def test_long_texts_are_asked_for_in_several_packets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "MAX_KEYS", 5)
    writer = l3(groups=(full(), window(6)))
    compute(writer, TOKENS)
    reader = l3(objects=writer.objects, groups=(full(), window(6)))
    assert compute(reader, TOKENS, fetch=True).allocation.cached.l3 == 8 * P
    assert reader.cache.stats().store.exist_calls > 1


def test_a_call_is_bounded_in_pages_and_in_bytes(filled: dict[Name, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    reader = l3(objects=filled)
    compute(reader, TOKENS, fetch=True)
    assert reader.cache.stats().store.get_calls == 8 // PLAIN.batch_pages
    monkeypatch.setattr(fetches, "_CALL_BYTES", 2 * len(next(iter(filled.values()))))
    reader.cache.flush({"l1", "l2"})
    assert compute(reader, TOKENS, fetch=True).allocation.cached.l3 == 8 * P
    assert reader.cache.stats().store.get_calls == 8 // PLAIN.batch_pages + 8 // 2
