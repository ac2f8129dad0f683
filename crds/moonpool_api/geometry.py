"""The geometry of cached KV: which layers share a layout, what a block of theirs holds, and how many bytes that is.

A *cache group* is a set of layers with one layout and one retention. Its unit is the *block*: ``block_tokens`` tokens
of all its layers. Prefix granularity ``P`` is apart from that: it is the number of tokens per identity hash, and a
multiple of every group's ``block_tokens``.
"""

from __future__ import annotations

import math
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class PlaneGeometry(BaseModel):
    """One tensor of every layer of a group: ``shape`` is that of a row (history) or of a whole block (state)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


class GroupGeometry(BaseModel):
    """One cache group.

    Family *history*: rows that grow with the text, one per ``stride`` tokens; ``window`` is the number of tokens that
    attention looks back, the current one included, None for all. Family *state*: one opaque checkpoint per block, the
    state after the block's last token; ``stride`` and ``window`` do not apply.

    A block is stored as one contiguous run: for each layer, for each plane, ``[rows, *shape]``.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    family: Literal["history", "state"] = "history"
    window: int | None = Field(default=None, gt=0)
    block_tokens: int = Field(gt=0)
    stride: int = Field(default=1, gt=0)
    layers: tuple[int, ...] = Field(min_length=1)
    planes: tuple[PlaneGeometry, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _consistent(self) -> GroupGeometry:
        if self.block_tokens % self.stride:
            raise ValueError(f"group {self.name}: a block of {self.block_tokens} tokens has no whole number of rows")
        if self.family == "state" and (self.window is not None or self.stride != 1):
            raise ValueError(f"group {self.name}: a state has neither window nor stride")
        return self

    @property
    def rows(self) -> int:
        """Rows of a block; 1 for a state."""
        return 1 if self.family == "state" else self.block_tokens // self.stride

    @property
    def bytes_per_block(self) -> int:
        return len(self.layers) * self.rows * sum(plane.nbytes for plane in self.planes)


class CacheGeometry(BaseModel):
    """All cache groups of a model, and the prefix granularity that they share."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    layout: str = "groups/1"
    prefix_granularity: int = Field(gt=0)
    groups: tuple[GroupGeometry, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _aligned(self) -> CacheGeometry:
        for group in self.groups:
            if self.prefix_granularity % group.block_tokens:
                raise ValueError(
                    f"a prefix granularity of {self.prefix_granularity} tokens is no multiple of group {group.name}'s "
                    f"blocks of {group.block_tokens}"
                )
        if len({group.name for group in self.groups}) != len(self.groups):
            raise ValueError("two cache groups have the same name")
        return self

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one more token costs in the groups that keep all of the text."""
        full = (group for group in self.groups if group.family == "history" and group.window is None)
        return sum(group.bytes_per_block // group.block_tokens for group in full)

    @property
    def bytes_per_page(self) -> int:
        """Bytes of everything that a prefix page of ``prefix_granularity`` tokens publishes, all groups together."""
        return sum(self.prefix_granularity // group.block_tokens * group.bytes_per_block for group in self.groups)


def full_attention(
    *, layers: int, kv_heads: int, head_dim: int, dtype: str, prefix_granularity: int, block_tokens: int | None = None
) -> CacheGeometry:
    """The geometry of an ordinary transformer: one group of K and V rows ``[kv_heads, head_dim]``, all kept."""
    row = (kv_heads, head_dim)
    group = GroupGeometry(
        name="full",
        block_tokens=block_tokens or prefix_granularity,
        layers=tuple(range(layers)),
        planes=(PlaneGeometry(name="k", shape=row, dtype=dtype), PlaneGeometry(name="v", shape=row, dtype=dtype)),
    )
    return CacheGeometry(prefix_granularity=prefix_granularity, groups=(group,))
