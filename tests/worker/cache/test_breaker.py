from __future__ import annotations

from moonpool_worker.cache.store_tier.breaker import CLOSED, HALF_OPEN, OPEN, Breaker
from moonpool_worker.cache.store_tier.codes import describe, is_fault
from moonpool_worker.cache.store_tier.negative_cache import NegativeCache


def opened() -> Breaker:
    breaker = Breaker(threshold=2, pause=1, max_pause=4)
    breaker.failed(0)
    breaker.failed(0)
    return breaker


def test_opens_after_faults_in_a_row_only() -> None:
    breaker = Breaker(threshold=2)
    breaker.failed(0)
    breaker.succeeded()
    breaker.failed(0)
    assert breaker.state == CLOSED
    breaker.failed(0)
    assert breaker.state == OPEN
    assert not breaker.allows(0)


def test_half_open_admits_one_call_at_a_time() -> None:
    breaker = opened()
    assert not breaker.probe_due(0.9)
    assert breaker.probe_due(1)
    breaker.probe_succeeded()
    assert breaker.state == HALF_OPEN
    assert breaker.allows(0)
    assert not breaker.allows(1)
    breaker.succeeded()
    assert breaker.state == CLOSED


def test_the_pause_doubles_up_to_its_limit() -> None:
    breaker = opened()
    now = 0.0
    for pause in (1, 2, 4, 4):
        assert not breaker.probe_due(now + pause - 0.01)
        now += pause
        assert breaker.probe_due(now)
        breaker.failed(now)


def test_answers_to_old_calls_do_not_close_it() -> None:
    breaker = opened()
    breaker.succeeded()
    assert breaker.state == OPEN


def test_refusals_and_misses_are_no_faults() -> None:
    assert not any(is_fault(code) for code in (1, 0, 4096, -704, -200, -1700, -1701))
    assert all(is_fault(code) for code in (-1, -800, -900, -901, -707))
    assert describe(-1701) == "TENANT_NOT_REGISTERED (-1701)"


def test_the_negative_cache_forgets() -> None:
    cache = NegativeCache(capacity=2, ttl=1)
    for name in (b"a", b"b", b"c"):
        cache.add(name, now=0)
    assert [cache.contains(name, 0.5) for name in (b"a", b"b", b"c")] == [False, True, True]
    cache.discard(b"b")
    assert [cache.contains(name, 0.5) for name in (b"b", b"c")] == [False, True]
    assert not cache.contains(b"c", 1.0)
