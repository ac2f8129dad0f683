"""What layers of the gated delta rule have in common: queries and keys of length 1, and the logarithm of the decay."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from moonpool_worker.kernels.interface import Kernels

#: Added to the sum of squares, as in Flash Linear Attention.
_EPS = 1e-6


class UnitHeads:
    """Heads [T, H, D] of length 1, times ``scale``."""

    def __init__(self, dim: int, scale: float, like: torch.Tensor) -> None:
        # A norm of length 1 is an RMS norm whose weights are all D ** -0.5.
        self._weight = torch.full((dim,), dim**-0.5 * scale, dtype=torch.float32, device=like.device)
        self._eps = _EPS / dim

    def __call__(self, kernels: Kernels, heads: torch.Tensor) -> torch.Tensor:
        return kernels.rms_norm(heads, self._weight, self._eps)


def log_decay(x: torch.Tensor, bias: torch.Tensor, rate: torch.Tensor) -> torch.Tensor:
    """``rate`` * softplus(``x`` + ``bias``), float32, at most 0 as ``rate`` is (Mamba, Gu and Dao, 2023)."""
    return rate * F.softplus(x.float() + bias)
