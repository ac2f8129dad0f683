"""Models with sliding windows through the scheduler and the real cache, several windows long: hits, swaps and pages
from L2 change no token."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.worker.engine.test_hybrid_serving import Service, cached
from tests.worker.models.family_case import PAGE, FamilyCase
from tests.worker.models.test_family_gemma3 import TestGemma3
from tests.worker.models.test_family_gpt_oss import CONFIG as GPT_OSS
from tests.worker.models.test_family_mistral import TestMistral

pytestmark = pytest.mark.family

CONFIGS = {"gemma3": TestGemma3.config, "gpt_oss": GPT_OSS, "mistral": TestMistral.config}
del TestGemma3, TestMistral  # or their tests would run here again


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
    """The window's pages before the parting are still there, though other texts have gone on behind it."""
    service, system = Service(case), case.ids(4 * PAGE)
    found = [cached(service.check([*system, *case.ids(40, seed=n)])[0]) for n in range(20, 23)]
    assert found == [0, 4 * PAGE, 4 * PAGE]


def test_concurrent_requests_that_do_not_fit_are_swapped(case: FamilyCase) -> None:
    prompts = [case.ids(size, seed=size) for size in (70, 53, 81, 40, 67)]
    least = next(n for n in range(3, 200) if Service(case, n).cache.longest(32) >= 98)
    # How much is too little for several, but enough for one, depends on the groups.
    services = [Service(case, parents, l2_bytes=8 << 20, budget=32) for parents in range(least, least + 3)]
    expected = [request.token_ids for request in services[0].check(*prompts, tokens=16)]
    for service in services[1:]:
        assert [request.token_ids for request in service.answer(*prompts, tokens=16)] == expected
    assert sum(service.scheduler.preemptions for service in services) > 0


def test_pages_come_back_from_l2(case: FamilyCase) -> None:
    service, prompt = Service(case, l2_bytes=8 << 20), case.ids(90, seed=7)
    service.check(prompt)
    service.cache.flush({"l1"})
    (again,) = service.check(prompt)
    assert again.cached is not None and again.cached.l2 == cached(again) == 5 * PAGE
