"""What every architecture knows about itself; a family adds its own fields."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Sizes in elements, ``context_length`` in tokens. ``rope_scaling``: what changes RoPE besides theta, flat."""

    architecture: str
    layers: int
    hidden: int
    vocab: int
    context_length: int
    rope_theta: float
    rope_scaling: dict[str, float | int | str] = field(default_factory=dict)
    norm_eps: float
    tied: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionConfig(ModelConfig):
    """With grouped-query attention and a gated feed-forward layer."""

    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
