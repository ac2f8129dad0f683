"""Rotary position embedding (Su et al., RoFormer, 2021): the table of angles, and the ways to stretch it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

#: What a configuration says about RoPE besides theta, flat: ``rope_type`` and its numbers. Empty when nothing.
Scaling = dict[str, float | int | str]

_NEEDED = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
_OPTIONAL = {"yarn": ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate")}


def rope_table(
    dim: int, context_length: int, theta: float, dtype: torch.dtype, scaling: Scaling | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of every position, each [context, dim / 2]; with yarn, times its attention factor."""
    frequencies, factor = rope_frequencies(dim, theta, scaling or {})
    angles = torch.outer(torch.arange(context_length, dtype=torch.float64), frequencies)
    return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)


def rope_frequencies(dim: int, theta: float, scaling: Scaling) -> tuple[torch.Tensor, float]:
    """Angles per position, float64 [dim / 2], and what cos and sin are multiplied by."""
    plain = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    kind = scaling.get("rope_type", "default")
    if kind == "linear":
        return plain / float(scaling["factor"]), 1.0
    if kind == "llama3":
        return _llama3(plain, scaling), 1.0
    if kind == "yarn":
        return _yarn(plain, dim, theta, scaling), yarn_attention_factor(scaling)
    return plain, 1.0


def read_rope(raw: Mapping[str, Any]) -> tuple[float, Scaling]:
    """Theta and scaling of a configuration, old style or new. KeyError for a number that is missing, ValueError for a
    kind of scaling that is not known."""
    rope, scaling = raw.get("rope_parameters") or {}, raw.get("rope_scaling") or {}
    theta = float(raw.get("rope_theta") or rope.get("rope_theta") or 10000.0)
    return theta, read_scaling({**rope, **scaling}, int(raw["max_position_embeddings"]))


def read_scaling(given: Mapping[str, Any], context_length: int) -> Scaling:
    """``given`` is what stands in ``rope_scaling`` or ``rope_parameters``; ``context_length`` the model's."""
    kind = given.get("rope_type", given.get("type", "default"))
    if kind == "default":
        return {}
    if kind not in _NEEDED:
        raise ValueError(f"RoPE scaling {kind!r}")
    values = dict(given)
    original = values.setdefault("original_max_position_embeddings", context_length)
    if values.get("factor") is None and kind == "yarn" and original != context_length:
        values["factor"] = context_length / original
    scaling: Scaling = {"rope_type": kind}
    for name in _NEEDED[kind]:
        if values.get(name) is None:
            raise KeyError(f"{name} of RoPE scaling {kind!r}")
        scaling[name] = values[name]
    for name in _OPTIONAL.get(kind, ()):
        if values.get(name) is not None:
            scaling[name] = int(values[name]) if isinstance(values[name], bool) else values[name]
    return scaling


def no_scaling(raw: Mapping[str, Any]) -> float:
    """RoPE's theta of a configuration, old style or new. ValueError when it scales positions."""
    rope = raw.get("rope_parameters") or {}
    scaling = raw.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type", rope.get("rope_type", "default")))
    if kind != "default":
        raise ValueError(f"RoPE scaling {kind!r}")
    return float(raw.get("rope_theta") or rope.get("rope_theta") or 10000.0)


def yarn_attention_factor(scaling: Scaling) -> float:
    """The temperature of YaRN (Peng et al., 2023), as the factor of cos and sin."""
    given = scaling.get("attention_factor")
    if given is not None:
        return float(given)
    factor = float(scaling["factor"])
    numerator, denominator = float(scaling.get("mscale", 0)), float(scaling.get("mscale_all_dim", 0))
    if numerator and denominator:
        return yarn_mscale(factor, numerator) / yarn_mscale(factor, denominator)
    return yarn_mscale(factor)


def yarn_mscale(factor: float, weight: float = 1.0) -> float:
    """0.1 ln(factor) + 1, the logarithm weighted (DeepSeek-V2, 2024); 1 when nothing is stretched."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _llama3(plain: torch.Tensor, scaling: Scaling) -> torch.Tensor:
    """Frequencies of Llama 3.1 (2024): long waves are stretched, short ones not, and between them is a blend."""
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    turns = float(scaling["original_max_position_embeddings"]) * plain / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return plain * kept + plain / float(scaling["factor"]) * (1 - kept)


def _yarn(plain: torch.Tensor, dim: int, theta: float, scaling: Scaling) -> torch.Tensor:
    """YaRN by parts: dimensions that turn often over the original context are kept, those that turn seldom stretched,
    with a ramp over the dimensions between."""
    context = float(scaling["original_max_position_embeddings"])

    def dimension(turns: float) -> float:
        return dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = dimension(float(scaling.get("beta_fast", 32))), dimension(float(scaling.get("beta_slow", 1)))
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    # Where both ends fall together the ramp is a step.
    width = last - first or 0.001
    stretched = ((torch.arange(dim // 2, dtype=torch.float64) - first) / width).clamp(0, 1)
    return plain * (1 - stretched) + plain / float(scaling["factor"]) * stretched
