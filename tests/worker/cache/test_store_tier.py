"""L3 against a real Mooncake: what works, what the store refuses, and what happens when it breaks."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from moonpool_worker.cache.kv_cache import KVCache
from moonpool_worker.cache.stats import TierTokens
from moonpool_worker.cache.store_tier.options import StoreOptions

from tests.mooncake_fixture import MiB, RunningMooncake, available, running_mooncake
from tests.worker.cache.texts import BIG, NAMESPACE, P, make_cache, poll_until, serve, text

pytestmark = [pytest.mark.mooncake, pytest.mark.skipif(not available(), reason="Mooncake is not installed")]

#: Patient where a loaded machine is slow, impatient where the test waits for trouble.
PATIENT = StoreOptions(timeout_base=5, negative_ttl=0.02, refused_put_pause=0.1)
HASTY = replace(
    PATIENT, timeout_base=0.3, call_timeout=2.0, breaker_pause=0.3, breaker_max_pause=1.0, max_restart_pause=1.0
)
Opened = Callable[..., KVCache]


@pytest.fixture(scope="module")
def mooncake() -> Iterator[RunningMooncake]:
    with running_mooncake({"blue": 16 * MiB, "green": 16 * MiB}) as running:
        yield running


@pytest.fixture
def opened(mooncake: RunningMooncake) -> Iterator[Opened]:
    """Make caches with an open store; all are closed at the end."""
    caches: list[KVCache] = []

    def make(tenant: str = "blue", options: StoreOptions = PATIENT, master: str = "", **more: object) -> KVCache:
        cache = make_cache(store=options, **more)  # type: ignore[arg-type]
        caches.append(cache)
        cache.open_store(cache.namespace, tenant, master or mooncake.master)
        poll_until(cache, lambda: cache.store_state().state == "open", 30)
        return cache

    yield make
    for cache in caches:
        cache.close()


def put_all(cache: KVCache, blocks: int) -> None:
    poll_until(cache, lambda: cache.stats().store.put_blocks >= blocks, 20)


def test_another_worker_reads_what_one_wrote(opened: Opened) -> None:
    writer, reader = opened(), opened()
    serve(writer, text(10))
    put_all(writer, 10)
    assert serve(reader, text(10), fetch=True).cached == TierTokens(l3=10 * P)
    # Now they are the reader's own.
    assert serve(reader, text(10)).cached == TierTokens(l1=10 * P)


def test_a_real_geometry_in_several_batches(opened: Opened) -> None:
    sizes = {"geometry": BIG, "blocks": 100, "l2_bytes": 32 << 20}
    writer, reader = opened(**sizes), opened(options=replace(PATIENT, batch_pages=32), **sizes)
    tokens = text(70, seed=70, granularity=16)
    serve(writer, tokens)
    put_all(writer, 70)
    assert serve(reader, tokens, fetch=True).cached.l3 == 70 * 16
    assert reader.stats().store.get_calls == 3


def test_what_l1_and_l2_have_is_not_fetched(opened: Opened) -> None:
    writer, reader = opened(), opened()
    serve(writer, text(8, seed=3))
    put_all(writer, 8)
    assert serve(reader, text(8, seed=3)[: 3 * P + 1], fetch=True).cached.l3 == 3 * P
    reader.flush({"l1"})
    assert serve(reader, text(8, seed=3)[: 2 * P + 1]).cached == TierTokens(l2=2 * P)
    assert serve(reader, text(8, seed=3), fetch=True).cached == TierTokens(l1=2 * P, l2=P, l3=5 * P)


def test_a_tenant_and_a_namespace_see_their_own(opened: Opened) -> None:
    writer = opened()
    serve(writer, text(4, seed=4))
    put_all(writer, 4)
    for other in (opened("green"), opened(namespace="c" * 64)):
        assert serve(other, text(4, seed=4), fetch=True).cached_tokens == 0
        assert other.stats().store.fetches["absent"] == 1


def test_a_miss_is_not_asked_for_twice(opened: Opened) -> None:
    cache = opened(options=replace(PATIENT, negative_ttl=60))
    chain = cache.chain(text(4, seed=404))
    fetch = cache.start_fetch(chain)
    assert fetch is not None
    poll_until(cache, lambda: fetch.done)
    assert cache.start_fetch(chain) is None
    assert cache.stats().store.negative_hits == 1


def test_short_prompts_are_not_worth_a_fetch(opened: Opened) -> None:
    cache = opened(options=replace(PATIENT, min_pages=3))
    assert cache.start_fetch(cache.chain(text(2))) is None


def test_without_l2_a_staging_arena_carries(opened: Opened) -> None:
    writer, reader = opened(l2_bytes=0), opened(l2_bytes=0)
    serve(writer, text(6, seed=6))
    put_all(writer, 6)
    assert serve(reader, text(6, seed=6), fetch=True).cached == TierTokens(l3=6 * P)
    assert reader.stats().l2_cached_blocks == 0
    assert reader.stats().l2_free_slots == reader.stats().l2_slots


def test_a_dropped_fetch_leaves_nothing_pinned(opened: Opened) -> None:
    writer, reader = opened(), opened()
    serve(writer, text(6, seed=7))
    put_all(writer, 6)
    fetch = reader.start_fetch(reader.chain(text(6, seed=7)))
    assert fetch is not None
    reader.drop_fetch(fetch)
    poll_until(reader, lambda: fetch.calls == 0)
    assert reader.stats().l2_lent_slots == 0
    assert reader.flush({"l2"})["l2_blocks"] + reader.stats().l2_free_slots == reader.stats().l2_slots


def test_what_was_cached_before_l3_opened_is_put_when_used_again(mooncake: RunningMooncake, opened: Opened) -> None:
    cache = make_cache(store=PATIENT)
    serve(cache, text(4, seed=9))
    cache.open_store(NAMESPACE, "blue", mooncake.master)
    poll_until(cache, lambda: cache.store_state().state == "open", 30)
    serve(cache, text(4, seed=9))
    put_all(cache, 4)
    serve(cache, text(4, seed=9))
    serve(cache, text(4, seed=10))
    put_all(cache, 8)
    assert cache.stats().store.put_blocks == 8
    assert serve(opened(), text(4, seed=9), fetch=True).cached.l3 == 4 * P
    cache.close()


def test_a_late_answer_is_kept(opened: Opened) -> None:
    writer = opened()
    serve(writer, text(6, seed=8))
    put_all(writer, 6)
    reader = opened(options=replace(PATIENT, timeout_base=0.1, timeout_per_page=0, call_timeout=20))
    os.kill(reader.stats().client_pid, signal.SIGSTOP)
    fetch = reader.start_fetch(reader.chain(text(6, seed=8)))
    assert fetch is not None
    assert poll_until(reader, lambda: fetch.done) < 2
    assert fetch.outcome == "deadline"
    os.kill(reader.stats().client_pid, signal.SIGCONT)
    poll_until(reader, lambda: fetch.calls == 0)
    # Nobody answered anybody for so long: left alone for a moment, then tried, not replaced.
    assert reader.store_state().state == "failing"
    poll_until(reader, lambda: reader.store_state().state == "open")
    assert reader.stats().store.client_starts == 1
    assert reader.stats().l2_lent_slots == 0


def test_closing_is_acknowledged_and_another_tenant_can_follow(mooncake: RunningMooncake, opened: Opened) -> None:
    cache = opened()
    first = cache.stats().client_pid
    cache.close_store()
    assert cache.store_state().state == "closed"
    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)
    assert cache.start_fetch(cache.chain(text(9))) is None
    cache.open_store(NAMESPACE, "green", mooncake.master)
    poll_until(cache, lambda: cache.store_state().state == "open", 30)
    assert cache.store_state().tenant == "green"
    serve(cache, text(3, seed=11))
    put_all(cache, 3)


# -- what the store refuses ----------------------------------------------------------------------------------------


def test_an_unregistered_tenant_is_refused_until_it_is_registered(mooncake: RunningMooncake, opened: Opened) -> None:
    cache = opened("later")
    serve(cache, text(3, seed=21))
    poll_until(cache, lambda: "-1701" in cache.store_state().error)
    assert cache.store_state().state == "open"
    assert cache.stats().store.put_errors == {"-1701": 3}
    assert serve(cache, text(5, seed=22), fetch=True).cached_tokens == 0
    assert mooncake.register("later", 8 * MiB).status == 200
    pid = cache.stats().client_pid
    time.sleep(0.2)
    serve(cache, text(3, seed=23))
    put_all(cache, 3)
    assert cache.stats().client_pid == pid
    assert cache.store_state().error == ""


def test_a_fence_an_emptying_and_the_proof(mooncake: RunningMooncake, opened: Opened) -> None:
    assert mooncake.register("fenced", 8 * MiB).status == 200
    cache = opened("fenced")
    serve(cache, text(5, seed=31))
    put_all(cache, 5)
    assert mooncake.charged("fenced") > 0
    refused = mooncake.delete("fenced")
    assert (refused.status, refused.body["error_code"]) == (409, -1702)
    assert mooncake.remove_all("fenced") == 5
    assert mooncake.charged("fenced") == 0
    assert mooncake.fence("fenced").status == 200
    serve(cache, text(5, seed=32))
    poll_until(cache, lambda: "-1700" in cache.store_state().error)
    assert cache.stats().store.put_errors["-1700"] > 0
    assert mooncake.delete("fenced").status == 200
    time.sleep(0.2)
    serve(cache, text(5, seed=33))
    poll_until(cache, lambda: "-1701" in cache.store_state().error)
    cache.flush({"l1", "l2"})
    assert serve(cache, text(5, seed=31), fetch=True).cached_tokens == 0


# -- what breaks ---------------------------------------------------------------------------------------------------


def test_a_killed_client_is_replaced(opened: Opened) -> None:
    cache = opened()
    os.kill(cache.stats().client_pid, signal.SIGKILL)
    poll_until(cache, lambda: cache.store_state().state == "failing")
    assert "died with code -9" in cache.store_state().error
    serve(cache, text(4, seed=41))
    poll_until(cache, lambda: cache.store_state().state == "open", 30)
    serve(cache, text(4, seed=42))
    put_all(cache, 4)
    assert cache.stats().store.client_losses == {"died": 1}


def test_a_hung_client_is_killed_and_its_slots_come_back(opened: Opened) -> None:
    writer = opened()
    serve(writer, text(6, seed=43))
    put_all(writer, 6)
    cache = opened(options=HASTY)
    hung = cache.stats().client_pid
    os.kill(hung, signal.SIGSTOP)
    fetch = cache.start_fetch(cache.chain(text(6, seed=43)))
    assert fetch is not None
    assert poll_until(cache, lambda: fetch.done) < 1.5
    assert fetch.outcome == "deadline"
    poll_until(cache, lambda: cache.stats().client_pid not in (0, hung), 20)
    with pytest.raises(ProcessLookupError):
        os.kill(hung, 0)
    assert cache.stats().l2_lent_slots == 0
    poll_until(cache, lambda: cache.store_state().state == "open", 30)
    cache.drop_fetch(fetch)


def test_a_master_that_is_not_there_is_waited_for_in_the_background() -> None:
    with running_mooncake(store=False) as running:
        running.register("blue", 8 * MiB)
        running.kill("master")
        cache = make_cache(store=HASTY)
        started = time.monotonic()
        cache.open_store(NAMESPACE, "blue", running.master)
        serve(cache, text(4))
        assert time.monotonic() - started < 1
        poll_until(cache, lambda: cache.store_state().state == "failing", 30)
        started = time.monotonic()
        cache.close_store()
        assert time.monotonic() - started < 5
        cache.close()


def test_a_dead_master_costs_deadlines_and_the_cache_recovers() -> None:
    with running_mooncake({"blue": 16 * MiB}, client_ttl=3) as running:
        cache = make_cache(store=HASTY)
        cache.open_store(NAMESPACE, "blue", running.master)
        poll_until(cache, lambda: cache.store_state().state == "open", 30)
        serve(cache, text(4, seed=1))
        put_all(cache, 4)
        running.kill("master")
        slowest = 0.0
        for seed in range(50, 56):
            started = time.monotonic()
            serve(cache, text(4, seed=seed), fetch=True)
            slowest = max(slowest, time.monotonic() - started)
        # base 0.3 s + 4 pages, and slack for a loaded machine; the master's own time-outs are 4 s.
        assert slowest < 2
        poll_until(cache, lambda: cache.store_state().state == "failing", 30)
        running.start_master()
        running.wait_for_capacity()
        poll_until(cache, lambda: cache.store_state().state == "open", 30)
        recovers(cache)
        cache.close()


def test_a_hung_store_costs_deadlines_and_the_cache_recovers() -> None:
    with running_mooncake({"blue": 16 * MiB}, client_ttl=3) as running:
        cache = make_cache(store=HASTY)
        cache.open_store(NAMESPACE, "blue", running.master)
        poll_until(cache, lambda: cache.store_state().state == "open", 30)
        serve(cache, text(4, seed=1))
        put_all(cache, 4)
        cache.flush({"l1", "l2"})
        first = cache.stats().client_pid
        running.signal("store", signal.SIGSTOP)
        started = time.monotonic()
        serve(cache, text(4, seed=1), fetch=True)
        assert time.monotonic() - started < 2
        poll_until(cache, lambda: cache.stats().store.client_losses.total() > 0, 20)
        with pytest.raises(ProcessLookupError):
            os.kill(first, 0)
        assert cache.stats().l2_lent_slots == 0
        running.signal("store", signal.SIGCONT)
        running.wait_for_capacity()
        recovers(cache)
        cache.close()


def recovers(cache: KVCache, seconds: float = 30) -> None:
    """New blocks reach the store again, and come back from it."""
    deadline = time.monotonic() + seconds
    seed = 1000
    while time.monotonic() < deadline:
        seed += 1
        before = cache.stats().store.put_blocks
        serve(cache, text(4, seed=seed))
        try:
            poll_until(cache, lambda before=before: cache.stats().store.put_blocks >= before + 4, 1)
            cache.flush({"l1", "l2"})
            if serve(cache, text(4, seed=seed), fetch=True).cached.l3 == 4 * P:
                return
        except TimeoutError:
            continue
    raise TimeoutError(f"no recovery in {seconds} s: {cache.store_state()} {cache.stats().store}")
