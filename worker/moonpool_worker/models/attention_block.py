"""Attention of one decoder layer: projections, RoPE, cache rows, kernel, output.

Grouped-query attention (Ainslie et al., 2023); q, k and v are one matrix. Families differ in what is optional here:
biases, a norm of each head's query and key (Qwen3, Gemma 3), the softmax's scale, sinks (gpt-oss).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moonpool_worker.kernels.interface import Kernels, Linear
from moonpool_worker.models.step import Step
from moonpool_worker.weights.tensor_reader import TensorReader


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionForm:
    """Sizes, and what there is besides. ``scale``: D ** -0.5 when None. ``norm_offset`` is added to the weights of
    norms (Gemma stores them less 1)."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    sinks: bool = False
    scale: float | None = None
    norm_eps: float
    norm_offset: float = 0.0

    def shapes(self, prefix: str) -> dict[str, tuple[int, ...]]:
        """Tensors of one layer under Hugging Face's names. ``prefix`` ends with a dot."""
        rows = {"q": self.heads * self.head_dim, "k": self.kv_heads * self.head_dim, "v": self.kv_heads * self.head_dim}
        shapes: dict[str, tuple[int, ...]] = {f"{prefix}{n}_proj.weight": (r, self.hidden) for n, r in rows.items()}
        shapes[f"{prefix}o_proj.weight"] = (self.hidden, rows["q"])
        if self.qkv_bias:
            shapes |= {f"{prefix}{name}_proj.bias": (size,) for name, size in rows.items()}
        if self.out_bias:
            shapes[f"{prefix}o_proj.bias"] = (self.hidden,)
        if self.qk_norm:
            shapes |= {f"{prefix}{name}_norm.weight": (self.head_dim,) for name in "qk"}
        if self.sinks:
            shapes[f"{prefix}sinks"] = (self.heads,)
        return shapes


class AttentionBlock:
    """``layer`` of cache group ``group``."""

    def __init__(
        self, form: AttentionForm, reader: TensorReader, kernels: Kernels, prefix: str, layer: int, group: int
    ) -> None:
        self._form, self._layer, self._group = form, layer, group

        def projection(*names: str, bias: bool) -> Linear:
            weight = reader.matrix(*(f"{prefix}{name}_proj.weight" for name in names))
            return kernels.linear(
                weight, reader.read(*(f"{prefix}{name}_proj.bias" for name in names)) if bias else None
            )

        self.qkv = projection("q", "k", "v", bias=form.qkv_bias)
        self.out = projection("o", bias=form.out_bias)
        self.q_norm = self.k_norm = None
        if form.qk_norm:
            self.q_norm, self.k_norm = (
                read_norm(reader, f"{prefix}{name}_norm.weight", form.norm_offset) for name in "qk"
            )
        self.sinks = reader.read(f"{prefix}sinks", dtype=torch.float32) if form.sinks else None

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """[T, hidden] → [T, hidden]; this step's keys and values are in the cache afterwards."""
        form, kernels, plan = self._form, step.kernels, step.plans[self._group]
        keys = step.cache.view(self._group, self._layer, "k")
        values = step.cache.view(self._group, self._layer, "v")
        cos, sin = step.angles[self._group]
        turned = form.heads + form.kv_heads
        qkv = self.qkv(x).view(x.shape[0], turned + form.kv_heads, form.head_dim)
        if self.q_norm is None or self.k_norm is None:
            rotated = kernels.rope(qkv[:, :turned], cos, sin)
            q, k = rotated[:, : form.heads], rotated[:, form.heads :]
        else:
            q = kernels.rope(kernels.rms_norm(qkv[:, : form.heads], self.q_norm, form.norm_eps), cos, sin)
            k = kernels.rope(kernels.rms_norm(qkv[:, form.heads : turned], self.k_norm, form.norm_eps), cos, sin)
        kernels.write_rows(plan, keys, k)
        kernels.write_rows(plan, values, qkv[:, turned:])
        return self.out(kernels.attention(plan, q, keys, values, scale=form.scale, sinks=self.sinks))


def read_norm(reader: TensorReader, name: str, offset: float = 0.0) -> torch.Tensor:
    """A norm's weight; in float32 where ``offset`` is added, as the sum would lose what the stored number keeps."""
    return reader.read(name, dtype=torch.float32) + offset if offset else reader.read(name)
