"""Which experts a token goes to, and with what weight.

One rule covers the families: scores from the router's logits, a choice of the best (within the best groups of experts
where there are groups), weights from the scores of the chosen. A softmax over the chosen logits alone, as gpt-oss has
it, is a softmax over all with its chosen part normalised.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F

Score = Literal["softmax", "sigmoid", "sqrt_softplus"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """``top_k`` experts per token, weights summing to ``scale`` where they are ``normalised``.

    ``groups`` and ``top_groups``: choose among the experts of the best groups (DeepSeek-V2, 2024), which are ranked by
    the sum of their ``group_best`` best scores: 1 in DeepSeek-V2, 2 in DeepSeek-V3.
    """

    top_k: int
    score: Score = "softmax"
    normalised: bool = True
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    group_best: int = 2


class Choice(NamedTuple):
    """``experts`` int64 [T, top_k] and their ``weights`` float32 [T, top_k]."""

    experts: torch.Tensor
    weights: torch.Tensor


class Router:
    """``weight`` [experts, hidden] and ``logit_bias`` [experts] give the logits; ``choice_bias`` [experts] moves the
    choice but not the weights (the correction for balance of DeepSeek-V3, 2024). All are used in float32: experts with
    nearly equal scores must not change places by rounding."""

    def __init__(
        self,
        routing: Routing,
        weight: torch.Tensor,
        *,
        choice_bias: torch.Tensor | None = None,
        logit_bias: torch.Tensor | None = None,
    ) -> None:
        self.routing = routing
        self._weight = weight.float()
        self._choice_bias = None if choice_bias is None else choice_bias.float()
        self._logit_bias = None if logit_bias is None else logit_bias.float()

    def __call__(self, x: torch.Tensor) -> Choice:
        """``x`` [T, hidden]."""
        scores = self.scores(x)
        ranked = scores if self._choice_bias is None else scores + self._choice_bias
        if self.routing.groups > 1:
            ranked = _within_best_groups(ranked, self.routing)
        return self.weighted(scores, ranked.topk(self.routing.top_k, dim=-1).indices)

    def scores(self, x: torch.Tensor) -> torch.Tensor:
        """float32 [T, experts]."""
        logits = F.linear(x.float(), self._weight, self._logit_bias)
        if self.routing.score == "softmax":
            return logits.softmax(-1)
        return logits.sigmoid() if self.routing.score == "sigmoid" else F.softplus(logits).sqrt_()

    def weighted(self, scores: torch.Tensor, experts: torch.Tensor) -> Choice:
        """The choice of ``experts`` [T, top_k], however they were chosen, with weights from ``scores``."""
        weights = scores.gather(1, experts)
        if self.routing.normalised:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return Choice(experts, weights if self.routing.scale == 1.0 else weights * self.routing.scale)


def _within_best_groups(ranked: torch.Tensor, routing: Routing) -> torch.Tensor:
    """``ranked`` [T, experts] with -inf for the experts of all but the best groups."""
    grouped = ranked.view(ranked.shape[0], routing.groups, -1)
    best = grouped.topk(routing.group_best, dim=-1).values.sum(-1)
    chosen = best.topk(routing.top_groups, dim=-1).indices
    passed_over = torch.ones_like(best, dtype=torch.bool).scatter_(1, chosen, False)
    return grouped.masked_fill(passed_over.unsqueeze(-1), float("-inf")).view_as(ranked)
