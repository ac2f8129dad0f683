"""The real cache tells its events: after any sequence of calls, subscribers know exactly what can be found."""

from __future__ import annotations

import random

import pytest
from moonpool_api.geometry import GroupGeometry
from moonpool_worker.cache.block_pool import BlockPool
from moonpool_worker.cache.events.residency import Residency
from moonpool_worker.cache.kv_cache import KVCache

from tests.worker.cache import groups_machine
from tests.worker.cache.events.test_residency import Told
from tests.worker.cache.groups_machine import GROUPS, OPERATIONS, GroupsMachine
from tests.worker.cache.imagined_model import P, cache_of

pytestmark = pytest.mark.property


def boundaries(pool: BlockPool, groups: int) -> set[bytes]:
    """Links that every group has."""
    links = [{node.digest for node in pool.nodes() if node.group == group} for group in range(groups)]
    return set.intersection(*links)


@pytest.mark.parametrize("groups", GROUPS, ids=lambda groups: "+".join(group.name for group in groups))
def test_after_any_sequence_of_calls(groups: tuple[GroupGeometry, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    announced = 0
    for seed in range(3):
        told = Told()
        residency = Residency(told, len(groups), P)

        def with_events(*of: GroupGeometry, events: Residency = residency, **options: object) -> KVCache:
            return cache_of(*of, events=events, **options)

        monkeypatch.setattr(groups_machine, "cache_of", with_events)
        chance = random.Random(seed)
        machine = GroupsMachine(groups, chance.randrange(4, 24), chance.choice((0, 6, 24)))
        for _ in range(120):
            machine.do(chance.choice(OPERATIONS), chance)
            machine.cache.poll()
            assert told.held["l1"] == boundaries(machine.cache._pool, len(groups))
            host = machine.cache._host
            assert told.held["l2"] == (boundaries(host.index, len(groups)) if host else set())
            announced += residency.announced
        machine.finish()
    assert announced > 60, "hardly anything was ever announced"
