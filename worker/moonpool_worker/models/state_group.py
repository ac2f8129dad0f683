"""The cache group of layers that keep a recurrent state: a window of inputs and a matrix per head, one block a page."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from moonpool_api.geometry import GroupGeometry, PlaneGeometry

from moonpool_worker.models.step import Step

_WINDOW, _RECURRENT = "window", "recurrent"


class LayerState(NamedTuple):
    """The step's plan, and the states of one layer by block: ``window`` [blocks, channels, width - 1], the last inputs
    of the convolution, and ``recurrent`` [blocks, *shape], float32."""

    plan: Any
    window: torch.Tensor
    recurrent: torch.Tensor

    @classmethod
    def of(cls, step: Step, group: int, layer: int) -> LayerState:
        cache = step.cache
        return cls(step.plans[group], cache.view(group, layer, _WINDOW), cache.view(group, layer, _RECURRENT))


def state_group(
    layers: tuple[int, ...], *, channels: int, width: int, recurrent: tuple[int, ...], dtype: str, granularity: int
) -> GroupGeometry:
    """``width``: taps of the convolution over ``channels``; ``recurrent``: shape of a layer's matrix state.

    The recurrent state is float32 whatever the model is: it is a sum over the whole text.
    """
    return GroupGeometry(
        name="state",
        family="state",
        block_tokens=granularity,
        layers=layers,
        planes=(
            PlaneGeometry(name=_WINDOW, shape=(channels, width - 1), dtype=dtype),
            PlaneGeometry(name=_RECURRENT, shape=recurrent, dtype="float32"),
        ),
    )
