"""Compress the tokens of a stretch of text into one row: a mean with a gate per token and channel.

A kernel for GPUs would do, for one entry and a block of channels, what is three passes here: read the raw rows through
the block table, take softmax and sum in registers, and go on with norm, RoPE and the write, as they need whole rows.
"""

from __future__ import annotations

import torch


def gated_mean(values: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
    """``values``, ``gates`` [N, tokens, D] → [N, D]: the mean over the tokens with softmax(gates) as weights, which are
    computed in float32. A gate of -inf leaves a token out; its value must be finite."""
    weights = gates.softmax(dim=1, dtype=torch.float32).to(values.dtype)
    return (values * weights).sum(1)
