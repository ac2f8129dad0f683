"""Models with recurrent states through the scheduler and the real cache: hits, checkpoints and swaps change no token.

The tokens are transformers' own; the cache's states come from the kernels, not from an imagined model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from moonpool_worker.cache.device_arena import DeviceArena
from moonpool_worker.cache.kv_cache import KVCache
from moonpool_worker.engine.batch import StepBatch
from moonpool_worker.engine.request import FinishReason, Output, Request
from moonpool_worker.engine.scheduler import Scheduler
from moonpool_worker.models.runner import ModelRunner

from tests.worker.models.family_case import PAGE, FamilyCase
from tests.worker.models.test_family_kimi_linear import TestKimiLinear
from tests.worker.models.test_family_mamba2 import TestMamba2
from tests.worker.models.test_family_qwen3_next import TestQwen35

pytestmark = pytest.mark.family

CONFIGS = {"qwen3_5": TestQwen35.config, "kimi_linear": TestKimiLinear.config, "mamba2": TestMamba2.config}
del TestKimiLinear, TestMamba2, TestQwen35  # or their tests would run here again


class Nothing:
    def put(self, index: int, output: Output) -> None: ...

    def push(self, token_id: int) -> tuple[str, bool]:
        return "", False

    def finish(self) -> str:
        return ""


@pytest.fixture(scope="module", params=CONFIGS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FamilyCase]:
    case = FamilyCase(CONFIGS[request.param], tmp_path_factory.mktemp(request.param))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield case
    torch.set_num_threads(threads)


class Service:
    """The scheduler over a cache of its own; every request is answered greedily."""

    def __init__(self, case: FamilyCase, parents: int = 200, l2_bytes: int = 0, budget: int = 64) -> None:
        self._case = case
        arena = DeviceArena(case.geometry, parents)
        self.cache = KVCache(arena, "cd" * 32, l2_bytes)
        self.scheduler = Scheduler(self.cache, budget, max_running=8)
        self._runner = ModelRunner(case.runner.model, arena)

    def answer(
        self, *prompts: list[int], tokens: int = 6, before: Callable[[int], None] = lambda step: None
    ) -> list[Request]:
        """``before`` is called with the number of each step before it is planned."""
        requests = [Request(str(n), list(prompt), tokens, Nothing(), Nothing()) for n, prompt in enumerate(prompts)]
        for request in requests:
            self.scheduler.add(request)
        for number in range(1000):
            if not len(self.scheduler):
                return requests
            before(number)
            self._step()
        pytest.fail("not finished after 1,000 steps")

    def _step(self) -> None:
        self.cache.poll()
        work = self.scheduler.schedule()
        if not work:
            return
        logits = iter(self._runner.forward(StepBatch([item.chunk for item in work])).argmax(-1).tolist())
        self.scheduler.computed(work)
        for item in work:
            request = item.request
            if not item.chunk.wants_logits:
                continue
            request.token_ids.append(next(logits))
            if request.generated >= request.max_tokens:
                request.finish_reason = FinishReason.LENGTH
                self.scheduler.remove(request)

    def check(
        self, *prompts: list[int], tokens: int = 6, before: Callable[[int], None] = lambda step: None
    ) -> list[Request]:
        """Answer, and compare with transformers."""
        requests = self.answer(*prompts, tokens=tokens, before=before)
        for request, prompt in zip(requests, prompts, strict=True):
            assert request.token_ids[len(prompt) :] == self._case.expected_greedy(prompt, tokens)
        return requests


def cached(request: Request) -> int:
    return 0 if request.cached is None else request.cached.total


def test_second_turn_hits_the_first(case: FamilyCase) -> None:
    service = Service(case)
    (first,) = service.check(case.ids(70))
    (second,) = service.check([*first.token_ids, *case.ids(20, seed=9)])
    assert cached(first) == 0
    assert cached(second) == 4 * PAGE


def test_shared_prefix_gets_a_checkpoint_of_its_own(case: FamilyCase) -> None:
    """Of texts that part in the middle of a chunk, the third finds the state where they part."""
    if not any(group.family == "history" for group in case.geometry.groups):
        pytest.skip("without rows nothing says that two texts are the same up to a place without a state")
    service, system = Service(case), case.ids(2 * PAGE)
    found = [cached(service.check([*system, *case.ids(30, seed=n)])[0]) for n in range(20, 24)]
    assert found[0] == 0
    assert found[2:] == [2 * PAGE, 2 * PAGE]


def test_a_swap_to_l2_changes_no_token(case: FamilyCase) -> None:
    """In the middle of a page: rows and the running state must come back as they were."""
    service = Service(case, l2_bytes=8 << 20)
    prompts, tokens = [case.ids(size, seed=size) for size in (28, 41)], 10
    swapped: list[Request] = []

    def swap(step: int) -> None:
        if step == 5:
            for request in list(service.scheduler.running):
                assert request.generated
                service.scheduler._preempt(request)
                assert request.suspended is not None
                swapped.append(request)

    service.check(*prompts, tokens=tokens, before=swap)
    assert len(swapped) == 2


def test_pages_and_states_come_back_from_l2(case: FamilyCase) -> None:
    service, prompt = Service(case, l2_bytes=8 << 20), case.ids(75, seed=7)
    service.check(prompt)
    service.cache.flush({"l1"})
    (again,) = service.check(prompt)
    assert again.cached is not None and again.cached.l2 == cached(again) == 4 * PAGE
