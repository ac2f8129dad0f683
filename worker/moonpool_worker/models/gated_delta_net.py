"""The Gated DeltaNet layer of Qwen3-Next and Qwen3.5 (Yang et al., 2024): convolution, gated delta rule, gated norm."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from moonpool_api.geometry import GroupGeometry

from moonpool_worker.kernels.interface import Kernels
from moonpool_worker.models.delta_rule import UnitHeads, log_decay
from moonpool_worker.models.state_group import LayerState, state_group
from moonpool_worker.models.step import Step
from moonpool_worker.weights.tensor_reader import TensorReader


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNetForm:
    """``key_heads`` of ``key_dim`` are shared by ``value_heads`` of ``value_dim``, ``width`` is the convolution's.

    ``interleaved``: q, k, v and the gate are one stored matrix, and b and a another, both key head by key head
    (Qwen3-Next); else they are stored apart (Qwen3.5).
    """

    hidden: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    width: int
    norm_eps: float
    interleaved: bool

    @property
    def keys(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Of the convolution: q, k and v."""
        return 2 * self.keys + self.values

    def shapes(self, prefix: str) -> dict[str, tuple[int, ...]]:
        """Tensors of one layer under Hugging Face's names. ``prefix`` ends with a dot."""
        if self.interleaved:
            rows = {"qkvz": self.channels + self.values, "ba": 2 * self.value_heads}
        else:
            rows = {"qkv": self.channels, "z": self.values, "b": self.value_heads, "a": self.value_heads}
        shapes: dict[str, tuple[int, ...]] = {f"{prefix}in_proj_{n}.weight": (r, self.hidden) for n, r in rows.items()}
        return shapes | {
            f"{prefix}conv1d.weight": (self.channels, 1, self.width),
            f"{prefix}A_log": (self.value_heads,),
            f"{prefix}dt_bias": (self.value_heads,),
            f"{prefix}norm.weight": (self.value_dim,),
            f"{prefix}out_proj.weight": (self.hidden, self.values),
        }

    def group(self, layers: tuple[int, ...], dtype: str, granularity: int) -> GroupGeometry:
        """The cache group of these layers."""
        recurrent = (self.value_heads, self.key_dim, self.value_dim)
        return state_group(
            layers,
            channels=self.channels,
            width=self.width,
            recurrent=recurrent,
            dtype=dtype,
            granularity=granularity,
        )


class GatedDeltaNet:
    """``layer`` of state group ``group``."""

    def __init__(
        self, form: DeltaNetForm, reader: TensorReader, kernels: Kernels, prefix: str, layer: int, group: int
    ) -> None:
        self._form, self._layer, self._group = form, layer, group
        # One matrix, in the order q, k, v, gate, b, a.
        self._in = kernels.linear(_projection(form, reader, prefix))
        self._widths = (form.channels, form.values, form.value_heads, form.value_heads)
        self._conv = reader.read(f"{prefix}conv1d.weight").squeeze(1)
        self._rate = -reader.read(f"{prefix}A_log", dtype=torch.float32).exp()
        self._dt_bias = reader.read(f"{prefix}dt_bias", dtype=torch.float32)
        self._norm = reader.read(f"{prefix}norm.weight")
        self._out = kernels.linear(reader.read(f"{prefix}out_proj.weight"))
        self._queries = UnitHeads(form.key_dim, form.key_dim**-0.5, self._norm)
        self._keys = UnitHeads(form.key_dim, 1.0, self._norm)

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """[T, hidden] → [T, hidden]; the states after this step are in the cache afterwards."""
        form, kernels, count = self._form, step.kernels, x.shape[0]
        state = LayerState.of(step, self._group, self._layer)
        mixed, gate, b, a = self._in(x).split(self._widths, dim=-1)
        mixed = kernels.causal_conv(state.plan, mixed, self._conv, None, state.window)
        q, k, v = mixed.split((form.keys, form.keys, form.values), dim=-1)
        share = form.value_heads // form.key_heads
        q, k = (
            unit(kernels, heads.view(count, form.key_heads, form.key_dim)).repeat_interleave(share, dim=1)
            for unit, heads in ((self._queries, q), (self._keys, k))
        )
        v = v.view(count, form.value_heads, form.value_dim)
        g, beta = log_decay(a, self._dt_bias, self._rate), torch.sigmoid(b.float())
        attended = kernels.gated_delta(state.plan, q, k, v, g, beta, state.recurrent)
        normed = kernels.rms_norm(attended, self._norm, form.norm_eps).view(count, -1)
        return self._out((normed * F.silu(gate.float())).to(x.dtype))


def _projection(form: DeltaNetForm, reader: TensorReader, prefix: str) -> torch.Tensor:
    """[channels + values + 2 * value heads, hidden], rows in the order q, k, v, gate, b, a."""
    if not form.interleaved:
        return reader.read(*(f"{prefix}in_proj_{name}.weight" for name in ("qkv", "z", "b", "a")))
    share = form.value_heads // form.key_heads
    wide = reader.read(f"{prefix}in_proj_qkvz.weight").view(form.key_heads, -1, form.hidden)
    narrow = reader.read(f"{prefix}in_proj_ba.weight").view(form.key_heads, -1, form.hidden)
    parts = wide.split((form.key_dim, form.key_dim, share * form.value_dim, share * form.value_dim), dim=1)
    return torch.cat([part.flatten(0, 1) for part in (*parts, *narrow.split((share, share), dim=1))])
