"""Depthwise causal convolution over a short window of inputs."""

from __future__ import annotations

import torch

from moonpool_worker.kernels.scans.segments import StatePlan, run


def causal_conv(
    plan: StatePlan,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    *,
    silu: bool = True,
) -> torch.Tensor:
    """See :class:`moonpool_worker.kernels.interface.Kernels`. Sums are float32, from the oldest input on."""
    out = torch.empty_like(x)
    taps = weight.float().t().contiguous()  # [W, C]
    width = taps.shape[0]

    def convolve(window: torch.Tensor) -> torch.Tensor:
        """[B, W - 1 + L, C] → [B, L, C]."""
        wide = window.float()
        rows = wide.shape[1] - width + 1
        total = wide[:, :rows] * taps[0]
        for tap in range(1, width):
            total += wide[:, tap : tap + rows] * taps[tap]
        if bias is not None:
            total += bias
        return _silu(total) if silu else total

    def step(rows: torch.Tensor | slice, before: torch.Tensor) -> torch.Tensor:
        window = torch.cat([before, x[rows].unsqueeze(-1).to(before.dtype)], dim=-1)  # [B, C, W]
        out[rows] = convolve(window.transpose(1, 2)).squeeze(1).to(x.dtype)
        return window[..., 1:]

    def scan(rows: slice, before: torch.Tensor) -> torch.Tensor:
        window = torch.cat([before.t().to(x.dtype), x[rows]])
        out[rows] = convolve(window.unsqueeze(0)).squeeze(0).to(x.dtype)
        return window[window.shape[0] - width + 1 :].t()

    run(plan, states, step, scan)
    return out


def _silu(x: torch.Tensor) -> torch.Tensor:
    # Not F.silu: in float32 its bits depend on where in memory an element lies, those of exp do not.
    return x.div_(x.neg().exp_().add_(1))
