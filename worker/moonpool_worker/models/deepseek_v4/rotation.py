"""RoPE over the last numbers of a row, each turned with its neighbour."""

from __future__ import annotations

import torch


def angles(positions: torch.Tensor, frequencies: torch.Tensor, factor: float) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, float32 [..., rope / 2], of ``positions`` [...]; ``frequencies`` float64 [rope / 2]."""
    turned = positions.unsqueeze(-1) * frequencies
    return (turned.cos() * factor).float(), (turned.sin() * factor).float()


def rotate_last(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """``x`` [..., D] in place, its last ``rope`` numbers; ``cos`` and ``sin`` broadcast to [..., rope / 2]. With -sin
    it turns back."""
    turned = x[..., x.shape[-1] - 2 * cos.shape[-1] :]
    even, odd = turned[..., 0::2].float(), turned[..., 1::2].float()
    first, second = even * cos - odd * sin, odd * cos + even * sin
    turned[..., 0::2], turned[..., 1::2] = first, second
    return x
