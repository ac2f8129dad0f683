"""Kimi Delta Attention (Kimi Linear, 2025): the gated delta rule with a decay per channel, and low-rank gates."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from moonpool_api.geometry import GroupGeometry

from moonpool_worker.kernels.interface import Kernels
from moonpool_worker.models.delta_rule import UnitHeads, log_decay
from moonpool_worker.models.state_group import LayerState, state_group
from moonpool_worker.models.step import Step
from moonpool_worker.weights.tensor_reader import TensorReader


@dataclass(frozen=True, slots=True, kw_only=True)
class KimiDeltaForm:
    """``heads`` of ``head_dim``, keys and values alike; ``width`` is the convolution's."""

    hidden: int
    heads: int
    head_dim: int
    width: int
    norm_eps: float

    @property
    def wide(self) -> int:
        return self.heads * self.head_dim

    def shapes(self, prefix: str) -> dict[str, tuple[int, ...]]:
        """Tensors of one layer under Hugging Face's names. ``prefix`` ends with a dot."""
        shapes: dict[str, tuple[int, ...]] = {f"{prefix}{n}_proj.weight": (self.wide, self.hidden) for n in "qkv"}
        shapes |= {f"{prefix}{n}_conv1d.weight": (self.wide, 1, self.width) for n in "qkv"}
        for gate in "fg":
            shapes[f"{prefix}{gate}_a_proj.weight"] = (self.head_dim, self.hidden)
            shapes[f"{prefix}{gate}_b_proj.weight"] = (self.wide, self.head_dim)
        return shapes | {
            f"{prefix}b_proj.weight": (self.heads, self.hidden),
            f"{prefix}A_log": (1, 1, self.heads, 1),
            f"{prefix}dt_bias": (self.wide,),
            f"{prefix}o_norm.weight": (self.head_dim,),
            f"{prefix}o_proj.weight": (self.hidden, self.wide),
        }

    def group(self, layers: tuple[int, ...], dtype: str, granularity: int) -> GroupGeometry:
        """The cache group of these layers."""
        recurrent = (self.heads, self.head_dim, self.head_dim)
        return state_group(
            layers,
            channels=3 * self.wide,
            width=self.width,
            recurrent=recurrent,
            dtype=dtype,
            granularity=granularity,
        )


class KimiDelta:
    """``layer`` of state group ``group``."""

    def __init__(
        self, form: KimiDeltaForm, reader: TensorReader, kernels: Kernels, prefix: str, layer: int, group: int
    ) -> None:
        self._form, self._layer, self._group = form, layer, group

        def read(*names: str) -> torch.Tensor:
            return reader.read(*(f"{prefix}{name}.weight" for name in names))

        # What is applied to the input is one matrix: q, k, v, the low ranks of decay and gate, beta.
        self._in = kernels.linear(read("q_proj", "k_proj", "v_proj", "f_a_proj", "g_a_proj", "b_proj"))
        self._widths = (3 * form.wide, form.head_dim, form.head_dim, form.heads)
        self._conv = read("q_conv1d", "k_conv1d", "v_conv1d").squeeze(1)
        self._decay, self._gate = kernels.linear(read("f_b_proj")), kernels.linear(read("g_b_proj"))
        rate = -reader.read(f"{prefix}A_log", dtype=torch.float32).exp()
        self._rate = rate.view(form.heads, 1)
        self._dt_bias = reader.read(f"{prefix}dt_bias", dtype=torch.float32).view(form.heads, form.head_dim)
        self._norm = read("o_norm")
        self._out = kernels.linear(read("o_proj"))
        self._queries = UnitHeads(form.head_dim, form.head_dim**-0.5, self._norm)
        self._keys = UnitHeads(form.head_dim, 1.0, self._norm)

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """[T, hidden] → [T, hidden]; the states after this step are in the cache afterwards."""
        form, kernels = self._form, step.kernels
        heads = (x.shape[0], form.heads, form.head_dim)
        state = LayerState.of(step, self._group, self._layer)
        mixed, decay, gate, beta = self._in(x).split(self._widths, dim=-1)
        mixed = kernels.causal_conv(state.plan, mixed, self._conv, None, state.window)
        q, k, v = (part.view(heads) for part in mixed.split(form.wide, dim=-1))
        g = log_decay(self._decay(decay).view(heads), self._dt_bias, self._rate)
        attended = kernels.gated_delta(
            state.plan,
            self._queries(kernels, q),
            self._keys(kernels, k),
            v,
            g,
            torch.sigmoid(beta.float()),
            state.recurrent,
        )
        normed = kernels.rms_norm(attended, self._norm, form.norm_eps)
        gated = normed * torch.sigmoid(self._gate(gate).view(heads).float())
        return self._out(gated.to(x.dtype).view(x.shape[0], -1))
