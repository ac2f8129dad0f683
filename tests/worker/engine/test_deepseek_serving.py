"""DeepSeek through the scheduler and the real cache: latent rows; and V4's five groups, of which two have strides and
two are short tails. Hits, swaps and returns from L2 change no token."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.worker.engine.test_hybrid_serving import Service, cached
from tests.worker.models.family_case import PAGE, FamilyCase
from tests.worker.models.test_family_deepseek import TestDeepseekV3
from tests.worker.models.test_family_deepseek_v4 import TestDeepseekV4

pytestmark = pytest.mark.family

CONFIGS = {"deepseek_v3": TestDeepseekV3.config, "deepseek_v4": TestDeepseekV4.config}
del TestDeepseekV3, TestDeepseekV4  # or their tests would run here again


@pytest.fixture(scope="module", params=CONFIGS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FamilyCase]:
    case = FamilyCase(CONFIGS[request.param], tmp_path_factory.mktemp(request.param))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield case
    torch.set_num_threads(threads)


def test_second_turn_hits_the_first(case: FamilyCase) -> None:
    service = Service(case)
    (first,) = service.check(case.ids(80))
    (second,) = service.check([*first.token_ids, *case.ids(20, seed=9)])
    assert cached(first) == 0
    assert cached(second) == 5 * PAGE


def test_shared_prefix_is_hit_where_texts_part(case: FamilyCase) -> None:
    service, system = Service(case), case.ids(4 * PAGE)
    found = [cached(service.check([*system, *case.ids(25, seed=n)])[0]) for n in range(20, 23)]
    assert found == [0, 4 * PAGE, 4 * PAGE]


def test_a_swap_to_l2_changes_no_token(case: FamilyCase) -> None:
    """In the middle of an entry, raw rows included, and again some tokens later."""
    service = Service(case, l2_bytes=8 << 20)
    prompts = [case.ids(size, seed=size) for size in (29, 42)]
    computed: list[int] = []

    def swap(step: int) -> None:
        if step in (5, 11):
            for request in list(service.scheduler.running):
                computed.append(request.computed)
                service.scheduler._preempt(request)
                assert request.suspended is not None

    service.check(*prompts, tokens=16, before=swap)
    assert len(computed) == 4 and all(tokens % 4 and tokens % 16 for tokens in computed)


def test_pages_come_back_from_l2(case: FamilyCase) -> None:
    service, prompt = Service(case, l2_bytes=8 << 20), case.ids(90, seed=7)
    service.check(prompt)
    service.cache.flush({"l1"})
    (again,) = service.check(prompt)
    assert again.cached is not None and again.cached.l2 == cached(again) == 5 * PAGE
