"""What all layers of one forward pass share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from moonpool_worker.engine.batch import StepBatch
from moonpool_worker.kernels.interface import Kernels
from moonpool_worker.models.family import Cache

#: cos and sin of each row of the step, [T, 1, D / 2].
Angles = tuple[torch.Tensor, torch.Tensor]
#: [T, hidden] → [T, hidden].
FeedForward = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Step:
    """``plans[g]``: cache group ``g``'s plan, of attention or of states. ``angles[g]``: how its rows are rotated."""

    kernels: Kernels
    cache: Cache
    plans: list[Any]
    angles: list[Angles]

    @classmethod
    def begin(
        cls, batch: StepBatch, cache: Cache, kernels: Kernels, angles: list[Angles], device: torch.device
    ) -> Step:
        plans = [
            kernels.state_plan(batch.chunks, index, device)
            if group.family == "state"
            else kernels.plan(batch.chunks, index, group, device)
            for index, group in enumerate(cache.geometry.groups)
        ]
        return cls(kernels, cache, plans, angles)
