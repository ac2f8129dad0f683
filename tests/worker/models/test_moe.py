"""Routing and experts against what their papers say, token by token."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from moonpool_worker.kernels.interface import select_backend
from moonpool_worker.models.mlp import GatedMLP
from moonpool_worker.models.moe import Experts, GroupedProduct, MixtureOfExperts, grouped_linear
from moonpool_worker.models.routing import Choice, Router, Routing

EXPERTS, HIDDEN, FFN, TOKENS = 8, 32, 16, 21


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def routed(routing: Routing, **biases: torch.Tensor) -> tuple[torch.Tensor, Choice]:
    """Logits and what the router made of them."""
    weight, x = torch.randn(EXPERTS, HIDDEN) * 0.3, torch.randn(TOKENS, HIDDEN)
    return F.linear(x, weight, biases.get("logit_bias")), Router(routing, weight, **biases)(x)


def test_softmax_weights_of_the_best_sum_to_one() -> None:
    logits, (experts, weights) = routed(Routing(top_k=3))
    best = logits.topk(3, dim=-1)
    assert torch.equal(experts, best.indices)
    torch.testing.assert_close(weights, best.values.softmax(-1))


def test_weights_that_are_not_normalised_are_the_probabilities_times_the_scale() -> None:
    logits, (experts, weights) = routed(Routing(top_k=2, normalised=False, scale=2.5))
    torch.testing.assert_close(weights, 2.5 * logits.softmax(-1).gather(1, experts))


def test_a_bias_of_the_logits_is_part_of_the_weights() -> None:
    logits, (experts, weights) = routed(Routing(top_k=2), logit_bias=torch.randn(EXPERTS))
    assert torch.equal(experts, logits.topk(2, dim=-1).indices)
    torch.testing.assert_close(weights, logits.gather(1, experts).softmax(-1))


@pytest.mark.parametrize("score", ["sigmoid", "sqrt_softplus"])
def test_a_bias_of_the_choice_is_no_part_of_the_weights(score: str) -> None:
    bias = torch.zeros(EXPERTS)
    bias[5] = 100.0
    logits, (experts, weights) = routed(Routing(top_k=2, score=score, scale=3.0), choice_bias=bias)
    assert (experts == 5).any(-1).all()
    scores = logits.sigmoid() if score == "sigmoid" else F.softplus(logits).sqrt()
    chosen = scores.gather(1, experts)
    torch.testing.assert_close(weights, 3.0 * chosen / chosen.sum(-1, keepdim=True))


@pytest.mark.parametrize("group_best", [1, 2])
def test_experts_come_from_the_best_groups_only(group_best: int) -> None:
    routing = Routing(top_k=3, score="sigmoid", groups=4, top_groups=2, group_best=group_best)
    logits, (experts, _) = routed(routing)
    seen_elsewhere = False
    for row, chosen in zip(logits.sigmoid(), experts, strict=True):
        groups = row.view(4, 2)
        rank = groups.sort(descending=True).values[:, :group_best].sum(-1)
        allowed = set(rank.topk(2).indices.tolist())
        inside = [expert for expert in row.argsort(descending=True).tolist() if expert // 2 in allowed][:3]
        assert chosen.tolist() == inside
        seen_elsewhere |= inside != row.topk(3).indices.tolist()
    assert seen_elsewhere, "without groups the choice would have been the same"


def one_by_one(x: torch.Tensor, choice: Choice, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    rows = []
    for token, experts, weights in zip(x, *choice, strict=True):
        total = torch.zeros(HIDDEN)
        for expert, weight in zip(experts.tolist(), weights, strict=True):
            gate, up = (gate_up[expert] @ token).chunk(2)
            total += weight * (down[expert] @ (F.silu(gate) * up))
        rows.append(total)
    return torch.stack(rows)


@pytest.mark.parametrize("tokens", [1, TOKENS])
def test_experts_are_the_weighted_sum_of_the_chosen(tokens: int) -> None:
    kernels = select_backend("torch")
    gate_up, down = torch.randn(EXPERTS, 2 * FFN, HIDDEN) * 0.2, torch.randn(EXPERTS, HIDDEN, FFN) * 0.2
    x = torch.randn(tokens, HIDDEN)
    # Expert 3 gets no token: the products of the others must not slip.
    chosen = torch.stack([torch.tensor([0, 1, 2, 4, 5, 6, 7])[torch.randperm(7)[:3]] for _ in range(tokens)])
    choice = Choice(chosen, torch.rand(tokens, 3))
    experts = Experts(
        grouped_linear(kernels, EXPERTS, lambda expert: gate_up[expert]),
        grouped_linear(kernels, EXPERTS, lambda expert: down[expert]),
        kernels.silu_mul,
        EXPERTS,
    )
    torch.testing.assert_close(experts(x, choice), one_by_one(x, choice, gate_up, down), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("biased", [False, True])
def test_one_grouped_product_is_what_a_product_per_expert_is(biased: bool) -> None:
    weight, counts = torch.randn(4, 24, HIDDEN) * 0.2, torch.tensor([3, 0, 5, 2])
    bias = torch.randn(4, 24) if biased else None
    rows = torch.randn(10, HIDDEN)
    single = grouped_linear(select_backend("torch"), 4, lambda expert: weight[expert], bias)
    torch.testing.assert_close(GroupedProduct(weight, bias)(rows, counts), single(rows, counts), atol=1e-5, rtol=1e-5)


def test_the_shared_expert_is_added_through_its_gate() -> None:
    kernels = select_backend("torch")
    matrices = torch.randn(EXPERTS, 2 * FFN, HIDDEN) * 0.2, torch.randn(EXPERTS, HIDDEN, FFN) * 0.2
    gate_up, down = (grouped_linear(kernels, EXPERTS, lambda expert, m=m: m[expert]) for m in matrices)
    experts = Experts(gate_up, down, kernels.silu_mul, EXPERTS)
    router = Router(Routing(top_k=2), torch.randn(EXPERTS, HIDDEN))
    shared = GatedMLP(
        kernels.linear(torch.randn(2 * FFN, HIDDEN) * 0.2),
        kernels.linear(torch.randn(HIDDEN, FFN) * 0.2),
        kernels.silu_mul,
    )
    gate, x = torch.randn(1, HIDDEN), torch.randn(TOKENS, HIDDEN)
    routed_part = MixtureOfExperts(router, experts)(x)
    torch.testing.assert_close(MixtureOfExperts(router, experts, shared)(x), routed_part + shared(x))
    gated = MixtureOfExperts(router, experts, shared, gate)(x)
    torch.testing.assert_close(gated, routed_part + torch.sigmoid(x @ gate.t()) * shared(x))
