"""What an architecture needs to know about itself."""

from __future__ import annotations

from dataclasses import dataclass

from moonpool_api.geometry import CacheGeometry

SUPPORTED_ARCHITECTURES = frozenset({"llama"})


@dataclass(frozen=True, slots=True)
class ModelConfig:
    architecture: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    context_length: int
    rope_theta: float
    norm_eps: float
    tied: bool

    def geometry(self, dtype: str, prefix_granularity: int) -> CacheGeometry:
        """The shape of this model's cached KV. ``dtype`` is ``float32`` or ``bfloat16``."""
        return CacheGeometry(
            layers=self.layers,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            dtype=dtype,
            prefix_granularity=prefix_granularity,
        )
