from __future__ import annotations

import math

import pytest
import torch
from moonpool_worker.sampling.params import SamplingParams
from moonpool_worker.sampling.sampler import SampledToken, Sampler, SamplerState

LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, -20.0])


def draw(params: SamplingParams, count: int = 1, logits: torch.Tensor = LOGITS) -> list[SampledToken]:
    state = SamplerState(params)
    return [Sampler().sample(logits[None], [params], [state])[0] for _ in range(count)]


def ids(tokens: list[SampledToken]) -> list[int]:
    return [token.token_id for token in tokens]


def test_greedy_takes_the_likeliest() -> None:
    assert ids(draw(SamplingParams(temperature=0.0), 5)) == [0] * 5


def test_the_same_seed_draws_the_same_tokens_whatever_runs_beside_it() -> None:
    params = SamplingParams(seed=7)
    alone = ids(draw(params, 50))
    state, neighbour = SamplerState(params), SamplingParams(seed=8)
    other = SamplerState(neighbour)
    beside = [
        Sampler().sample(torch.stack([LOGITS, LOGITS]), [neighbour, params], [other, state])[1].token_id
        for _ in range(50)
    ]
    assert beside == alone
    assert ids(draw(SamplingParams(seed=9), 50)) != alone


@pytest.mark.parametrize(
    "params",
    [SamplingParams(top_k=2, seed=1), SamplingParams(top_p=0.7, seed=1), SamplingParams(top_k=4, top_p=0.7, seed=1)],
)
def test_the_tail_is_cut(params: SamplingParams) -> None:
    assert set(ids(draw(params, 200))) == {0, 1}


def test_a_tiny_nucleus_is_greedy() -> None:
    assert set(ids(draw(SamplingParams(top_p=1e-6, seed=3), 50))) == {0}


@pytest.mark.parametrize("params", [SamplingParams(seed=5), SamplingParams(top_p=0.999999, seed=5)])
def test_frequencies_follow_the_distribution(params: SamplingParams) -> None:
    drawn = ids(draw(params, 3000))
    for token, expected in enumerate(LOGITS.softmax(-1).tolist()):
        assert drawn.count(token) / len(drawn) == pytest.approx(expected, abs=0.03)


def test_a_nucleus_wider_than_the_first_look() -> None:
    flat = torch.zeros(5000)
    assert max(ids(draw(SamplingParams(top_p=0.99, seed=2), 200, flat))) > 2000


def test_temperature_sharpens() -> None:
    assert set(ids(draw(SamplingParams(temperature=0.01, seed=4), 50))) == {0}


def test_logprobs_are_of_the_models_own_distribution() -> None:
    (token,) = draw(SamplingParams(temperature=0.0, logprobs=2))
    total = math.log(sum(math.exp(value) for value in LOGITS.tolist()))
    assert token.logprob == pytest.approx(2.0 - total, abs=1e-5)
    assert [candidate for candidate, _ in token.top_logprobs] == [0, 1]
    assert token.top_logprobs[1][1] == pytest.approx(1.0 - total, abs=1e-5)
    assert draw(SamplingParams(temperature=0.0))[0].logprob is None
    assert draw(SamplingParams(temperature=0.0, logprobs=0))[0].top_logprobs == []
