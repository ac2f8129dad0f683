"""Attention whose output is gated by its input, with RoPE on a part of each head: the full layers of Qwen3-Next."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from moonpool_api.geometry import GroupGeometry, PlaneGeometry

from moonpool_worker.kernels.interface import Kernels
from moonpool_worker.models.attention_block import read_norm
from moonpool_worker.models.step import Angles, Step
from moonpool_worker.weights.tensor_reader import TensorReader


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedAttentionForm:
    """RoPE turns the first ``rotary`` numbers of a head; ``norm_offset`` is added to the weights of norms."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    rotary: int
    norm_eps: float
    norm_offset: float

    def shapes(self, prefix: str) -> dict[str, tuple[int, ...]]:
        """Tensors of one layer under Hugging Face's names. ``prefix`` ends with a dot."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            f"{prefix}q_proj.weight": (2 * q, self.hidden),
            f"{prefix}k_proj.weight": (kv, self.hidden),
            f"{prefix}v_proj.weight": (kv, self.hidden),
            f"{prefix}o_proj.weight": (self.hidden, q),
            f"{prefix}q_norm.weight": (self.head_dim,),
            f"{prefix}k_norm.weight": (self.head_dim,),
        }

    def group(self, layers: tuple[int, ...], dtype: str, block_tokens: int) -> GroupGeometry:
        """The cache group of these layers: all of the text."""
        planes = (PlaneGeometry(name=name, shape=(self.kv_heads, self.head_dim), dtype=dtype) for name in "kv")
        return GroupGeometry(name="full", block_tokens=block_tokens, layers=layers, planes=tuple(planes))


class GatedAttention:
    """``layer`` of cache group ``group``."""

    def __init__(
        self, form: GatedAttentionForm, reader: TensorReader, kernels: Kernels, prefix: str, layer: int, group: int
    ) -> None:
        self._form, self._layer, self._group = form, layer, group
        # Stored head by head, a query's rows before its gate's; here they are one matrix with k and v, gates last.
        queries = reader.read(f"{prefix}q_proj.weight").view(form.heads, 2, form.head_dim, form.hidden)
        both = reader.read(f"{prefix}k_proj.weight", f"{prefix}v_proj.weight")
        self._in = kernels.linear(torch.cat([queries[:, 0].flatten(0, 1), both, queries[:, 1].flatten(0, 1)]))
        self._q_norm = read_norm(reader, f"{prefix}q_norm.weight", form.norm_offset)
        self._k_norm = read_norm(reader, f"{prefix}k_norm.weight", form.norm_offset)
        self._out = kernels.linear(reader.read(f"{prefix}o_proj.weight"))

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """[T, hidden] → [T, hidden]; this step's keys and values are in the cache afterwards."""
        form, kernels, plan = self._form, step.kernels, step.plans[self._group]
        keys = step.cache.view(self._group, self._layer, "k")
        values = step.cache.view(self._group, self._layer, "v")
        projected = self._in(x).view(x.shape[0], 2 * (form.heads + form.kv_heads), form.head_dim)
        q, k, v, gate = projected.split((form.heads, form.kv_heads, form.kv_heads, form.heads), dim=1)
        angles = step.angles[self._group]
        q = _rotate(kernels, kernels.rms_norm(q, self._q_norm, form.norm_eps), angles, form.rotary)
        k = _rotate(kernels, kernels.rms_norm(k, self._k_norm, form.norm_eps), angles, form.rotary)
        kernels.write_rows(plan, keys, k)
        kernels.write_rows(plan, values, v)
        attended = kernels.attention(plan, q, keys, values)
        return self._out(attended * torch.sigmoid(gate.reshape(attended.shape)))


def _rotate(kernels: Kernels, heads: torch.Tensor, angles: Angles, rotary: int) -> torch.Tensor:
    if rotary == heads.shape[-1]:
        return kernels.rope(heads, *angles)
    return torch.cat([kernels.rope(heads[..., :rotary], *angles), heads[..., rotary:]], dim=-1)
