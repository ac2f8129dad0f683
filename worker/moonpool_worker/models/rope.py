"""Rotary position embedding (Su et al., RoFormer, 2021): the table of angles."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def rope_table(dim: int, context_length: int, theta: float, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of every position, each [context, dim / 2]."""
    frequencies = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angles = torch.outer(torch.arange(context_length, dtype=torch.float64), frequencies)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def no_scaling(raw: Mapping[str, Any]) -> float:
    """RoPE's theta of a configuration, old style or new. ValueError when it scales positions."""
    rope = raw.get("rope_parameters") or {}
    scaling = raw.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type", rope.get("rope_type", "default")))
    if kind != "default":
        raise ValueError(f"RoPE scaling {kind!r}")
    return float(raw.get("rope_theta") or rope.get("rope_theta") or 10000.0)
