"""A weight that multiplies, and what it is made from."""

from __future__ import annotations

from typing import Protocol

import torch

from moonpool_worker.weights.quantised import QuantisedMatrix

#: A matrix [out, in]: numbers, or the blocks of a file.
Weight = torch.Tensor | QuantisedMatrix


class Linear(Protocol):
    """A weight in whatever layout the backend multiplies best."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, in] → [T, out]."""
        ...
