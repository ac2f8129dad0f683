"""The geometry of cached KV: what a block holds, and how many bytes that is."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class CacheGeometry(BaseModel):
    """Shape of one full-attention cache group.

    A block covers ``prefix_granularity`` tokens and is stored as one contiguous run of
    ``[layers, 2 (K, V), prefix_granularity, kv_heads, head_dim]`` elements of ``dtype``.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    layout: str = "full-attention/1"
    layers: int = Field(gt=0)
    kv_heads: int = Field(gt=0)
    head_dim: int = Field(gt=0)
    dtype: str
    prefix_granularity: int = Field(gt=0)

    @property
    def bytes_per_token(self) -> int:
        return self.layers * 2 * self.kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def bytes_per_block(self) -> int:
        return self.bytes_per_token * self.prefix_granularity
