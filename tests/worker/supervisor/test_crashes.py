from __future__ import annotations

from moonpool_worker.supervisor.crashes import LIMIT, PAUSE, SUSPECT, WINDOW, Crashes


def test_first_restart_is_at_once_and_the_others_wait() -> None:
    crashes = Crashes()
    pauses = []
    while not crashes.gives_up:
        crashes.add(now=10.0)
        pauses.append(crashes.pause)
    assert pauses[:4] == [0.0, PAUSE, 2 * PAUSE, 4 * PAUSE]
    assert len(pauses) == LIMIT
    # The kubelet's liveness probe allows 60 s without an answer; a start takes its own time besides.
    assert sum(pauses[:-1]) < 20


def test_old_crashes_are_forgotten_but_counted() -> None:
    crashes = Crashes()
    for hour in range(24):
        crashes.add(hour * 3600.0)
        assert (crashes.pause, crashes.gives_up, crashes.suspects_l2) == (0.0, False, False)
    assert crashes.total == 24


def test_what_crashes_again_and_again_gets_an_empty_l2() -> None:
    crashes = Crashes()
    suspected = []
    for second in range(SUSPECT):
        crashes.add(float(second))
        suspected.append(crashes.suspects_l2)
    assert suspected == [False] * (SUSPECT - 1) + [True]
    crashes.add(SUSPECT + WINDOW)
    assert not crashes.suspects_l2
