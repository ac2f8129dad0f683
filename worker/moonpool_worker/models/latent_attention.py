"""Multi-head latent attention (MLA; DeepSeek-V2, 2024) in its absorbed form.

A token leaves one row in the cache: ``rank`` numbers from which the keys and values of all heads could be computed, and
``rope`` numbers with RoPE that all heads share as a part of their keys. Keys and values are never computed: the matrix
that would make the keys is applied to the query instead, and the one for the values to what attention returns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from moonpool_api.geometry import GroupGeometry, PlaneGeometry

from moonpool_worker.kernels.interface import Kernels, Linear
from moonpool_worker.models.step import Step
from moonpool_worker.weights.tensor_reader import TensorReader

#: The plane of the rows [rank + rope].
LATENT = "latent"


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentShape:
    """``q_rank``: the query is low-rank too, None where it is not. A head's query and key have ``plain`` + ``rope``
    numbers, its value ``value``. ``rotated``: what RoPE turns, numbers and their neighbours or one half and the other;
    Kimi-Linear has no RoPE. ``eps`` is that of the norms inside."""

    hidden: int
    heads: int
    q_rank: int | None
    rank: int
    plain: int
    rope: int
    value: int
    scale: float
    rotated: Literal["neighbours", "halves", "nothing"] = "neighbours"
    eps: float = 1e-6

    @property
    def row(self) -> int:
        return self.rank + self.rope

    def tensors(self, prefix: str) -> dict[str, tuple[int, ...]]:
        """Tensors of one layer under Hugging Face's names. ``prefix`` ends with a dot."""
        q = self.heads * (self.plain + self.rope)
        shapes: dict[str, tuple[int, ...]] = {
            f"{prefix}kv_a_proj_with_mqa.weight": (self.row, self.hidden),
            f"{prefix}kv_a_layernorm.weight": (self.rank,),
            f"{prefix}kv_b_proj.weight": (self.heads * (self.plain + self.value), self.rank),
            f"{prefix}o_proj.weight": (self.hidden, self.heads * self.value),
        }
        if self.q_rank is None:
            return shapes | {f"{prefix}q_proj.weight": (q, self.hidden)}
        return shapes | {
            f"{prefix}q_a_proj.weight": (self.q_rank, self.hidden),
            f"{prefix}q_a_layernorm.weight": (self.q_rank,),
            f"{prefix}q_b_proj.weight": (q, self.q_rank),
        }

    def group(self, layers: tuple[int, ...], dtype: str, block_tokens: int) -> GroupGeometry:
        """The cache group of these layers: all of the text, one row per token."""
        plane = PlaneGeometry(name=LATENT, shape=(self.row,), dtype=dtype)
        return GroupGeometry(name=LATENT, block_tokens=block_tokens, layers=layers, planes=(plane,))


class LatentAttention:
    """``layer`` of cache group ``group``."""

    def __init__(
        self, shape: LatentShape, reader: TensorReader, kernels: Kernels, prefix: str, layer: int, group: int
    ) -> None:
        self._shape, self._layer, self._group = shape, layer, group
        s = shape

        def read(*names: str) -> torch.Tensor:
            return reader.read(*(f"{prefix}{name}.weight" for name in names))

        # What is applied to the input is one matrix: q (or its low-rank form), latent row.
        down = read("q_proj" if s.q_rank is None else "q_a_proj", "kv_a_proj_with_mqa")
        q_width = down.shape[0] - s.row
        if s.rotated == "neighbours":
            _halves_from_pairs(down[q_width + s.rank :])
            if s.q_rank is None:
                _halves_from_pairs(down[:q_width].view(s.heads, s.plain + s.rope, -1)[:, s.plain :])
        self._widths = (q_width, s.rank, s.rope)
        self._down = kernels.linear(down)
        self._q_norm: torch.Tensor | None = None
        self._q_up: Linear | None = None
        if s.q_rank is not None:
            self._q_norm = read("q_a_layernorm")
            q_up = read("q_b_proj")
            if s.rotated == "neighbours":
                _halves_from_pairs(q_up.view(s.heads, s.plain + s.rope, -1)[:, s.plain :])
            self._q_up = kernels.linear(q_up)
        self._latent_norm = read("kv_a_layernorm")
        up = read("kv_b_proj").view(s.heads, s.plain + s.value, s.rank)
        self._keys = up[:, : s.plain].contiguous()
        self._values = up[:, s.plain :].transpose(1, 2).contiguous()
        self._out = kernels.linear(read("o_proj"))

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """[T, hidden] → [T, hidden]; this step's latent rows are in the cache afterwards."""
        s, kernels, plan = self._shape, step.kernels, step.plans[self._group]
        count = x.shape[0]
        cache = step.cache.view(self._group, self._layer, LATENT)
        q, latent, shared = self._down(x).split(self._widths, dim=-1)
        if self._q_norm is not None and self._q_up is not None:
            q = self._q_up(kernels.rms_norm(q, self._q_norm, s.eps))
        q = q.reshape(count, s.heads, s.plain + s.rope)
        q_rope, shared = q[..., s.plain :], shared.unsqueeze(1)
        if s.rotated != "nothing":
            angles = step.angles[self._group]
            q_rope, shared = kernels.rope(q_rope, *angles), kernels.rope(shared, *angles)
        latent = kernels.rms_norm(latent, self._latent_norm, s.eps)
        kernels.write_rows(plan, cache, torch.cat([latent, shared.squeeze(1)], dim=-1))
        absorbed = torch.bmm(q[..., : s.plain].transpose(0, 1), self._keys).transpose(0, 1)
        q = torch.cat([absorbed, q_rope], dim=-1)
        attended = kernels.latent_attention(plan, q, cache, s.rank, scale=s.scale)
        values = torch.bmm(attended.transpose(0, 1), self._values).transpose(0, 1)
        return self._out(values.reshape(count, -1))


def _halves_from_pairs(rows: torch.Tensor) -> None:
    """Reorder ``rows`` [..., rope, in] in place, so that rotating halves is what rotating neighbours was. Scores do not
    change, as query and key are reordered alike."""
    rows.copy_(torch.cat([rows[..., 0::2, :], rows[..., 1::2, :]], dim=-2))
