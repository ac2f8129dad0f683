"""Mamba-2 (Dao and Gu, 2024): no attention at all, every layer is a state-space recurrence."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from moonpool_api.geometry import GroupGeometry

from moonpool_worker.engine.batch import StepBatch
from moonpool_worker.kernels.interface import Kernels
from moonpool_worker.models.config import ModelConfig
from moonpool_worker.models.family import Cache, Family
from moonpool_worker.models.read_config import refuse_quantised
from moonpool_worker.models.rows import last_rows, token_ids
from moonpool_worker.models.state_group import LayerState, state_group
from moonpool_worker.models.step import Step
from moonpool_worker.weights.tensor_reader import TensorReader

_EMBEDDING, _NORM, _HEAD = "backbone.embeddings.weight", "backbone.norm_f.weight", "lm_head.weight"
#: A recurrence has no longest text; this is what the engine counts with where the configuration names no length.
_CONTEXT = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Config(ModelConfig):
    """``heads`` of ``head_dim``, whose input and output matrices of ``state`` numbers are shared within ``groups``;
    ``width`` is the convolution's; steps are kept between ``step_limits``. ``wide_residual``: the sum over the layers
    is float32 whatever the model is."""

    heads: int
    head_dim: int
    state: int
    groups: int
    width: int
    bias: bool
    conv_bias: bool
    step_limits: tuple[float, float]
    wide_residual: bool

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Of the convolution: x, B and C."""
        return self.inner + 2 * self.groups * self.state


def tensor_shapes(config: Mamba2Config) -> dict[str, tuple[int, ...]]:
    """Every tensor that the family needs, under Hugging Face's names."""
    c = config
    shapes: dict[str, tuple[int, ...]] = {_EMBEDDING: (c.vocab, c.hidden), _NORM: (c.hidden,)}
    if not c.tied:
        shapes[_HEAD] = (c.vocab, c.hidden)
    for number in range(c.layers):
        prefix = f"backbone.layers.{number}."
        mixer = f"{prefix}mixer."
        shapes[f"{prefix}norm.weight"] = (c.hidden,)
        shapes |= {f"{mixer}{name}": (c.heads,) for name in ("A_log", "D", "dt_bias")}
        shapes[f"{mixer}in_proj.weight"] = (c.inner + c.channels + c.heads, c.hidden)
        shapes[f"{mixer}out_proj.weight"] = (c.hidden, c.inner)
        shapes[f"{mixer}conv1d.weight"] = (c.channels, 1, c.width)
        shapes[f"{mixer}norm.weight"] = (c.inner,)
        if c.bias:
            shapes[f"{mixer}in_proj.bias"] = (c.inner + c.channels + c.heads,)
            shapes[f"{mixer}out_proj.bias"] = (c.hidden,)
        if c.conv_bias:
            shapes[f"{mixer}conv1d.bias"] = (c.channels,)
    return shapes


class _Layer:
    def __init__(self, config: Mamba2Config, reader: TensorReader, kernels: Kernels, number: int) -> None:
        self._config, self._number = config, number
        c, prefix = config, f"backbone.layers.{number}."
        mixer = f"{prefix}mixer."

        def read(name: str, present: bool = True) -> torch.Tensor | None:
            return reader.read(f"{mixer}{name}") if present else None

        self._norm = reader.read(f"{prefix}norm.weight")
        self._in = kernels.linear(reader.read(f"{mixer}in_proj.weight"), read("in_proj.bias", c.bias))
        self._out = kernels.linear(reader.read(f"{mixer}out_proj.weight"), read("out_proj.bias", c.bias))
        self._conv = reader.read(f"{mixer}conv1d.weight").squeeze(1)
        self._conv_bias = read("conv1d.bias", c.conv_bias)
        self._gated_norm = reader.read(f"{mixer}norm.weight")
        self._ones = torch.ones(c.inner // c.groups, dtype=torch.float32, device=self._norm.device)
        self._rate = -reader.read(f"{mixer}A_log", dtype=torch.float32).exp()
        self._dt_bias = reader.read(f"{mixer}dt_bias", dtype=torch.float32)
        self._skip = reader.read(f"{mixer}D", dtype=torch.float32)

    def __call__(self, x: torch.Tensor, step: Step, dtype: torch.dtype) -> torch.Tensor:
        """``x`` [T, hidden], the sum so far, which may be overwritten by the result."""
        c, kernels, count = self._config, step.kernels, x.shape[0]
        state = LayerState.of(step, 0, self._number)
        h = kernels.rms_norm(x, self._norm, c.norm_eps).to(dtype)
        gate, mixed, dt = self._in(h).split((c.inner, c.channels, c.heads), dim=-1)
        mixed = kernels.causal_conv(state.plan, mixed, self._conv, self._conv_bias, state.window)
        inputs, keys, queries = mixed.split((c.inner, c.groups * c.state, c.groups * c.state), dim=-1)
        y = kernels.mamba2(
            state.plan,
            inputs.view(count, c.heads, c.head_dim),
            F.softplus(dt.float() + self._dt_bias).clamp(*c.step_limits),
            self._rate,
            keys.view(count, c.groups, c.state),
            queries.view(count, c.groups, c.state),
            self._skip,
            state.recurrent,
        )
        # The gate comes before this norm, which is one per group.
        gated = y.view(count, -1).float() * F.silu(gate.float())
        normed = kernels.rms_norm(gated.view(count, c.groups, -1), self._ones, c.norm_eps).view(count, -1)
        return x.add_(self._out(normed.to(dtype) * self._gated_norm))


class Mamba2:
    """Weights and forward pass. ``weight_bytes``: what the weights take in memory, a packed head included."""

    def __init__(self, config: Mamba2Config, reader: TensorReader, kernels: Kernels) -> None:
        self.config, self.dtype, self.kernels = config, reader.dtype, kernels
        self._embedding = reader.read(_EMBEDDING)
        self._norm = reader.read(_NORM)
        self._layers = [_Layer(config, reader, kernels, number) for number in range(config.layers)]
        self._head = kernels.linear(self._embedding if config.tied else reader.read(_HEAD))

    @property
    def weight_bytes(self) -> int:
        elements = sum(math.prod(shape) for shape in tensor_shapes(self.config).values())
        copied = self._embedding.numel() if self.config.tied else 0
        return (elements + copied) * self.dtype.itemsize

    def forward(self, batch: StepBatch, cache: Cache) -> torch.Tensor:
        """float32 logits [chunks that want them, vocab]."""
        c, kernels, device = self.config, self.kernels, self._embedding.device
        x = F.embedding(token_ids(batch, device), self._embedding)
        if c.wide_residual:
            x = x.float()
        step = Step.begin(batch, cache, kernels, [], device)
        for layer in self._layers:
            x = layer(x, step, self.dtype)
        # Only the rows that are asked for go through the head: the vocabulary is the largest product.
        last = last_rows(batch, x)
        if not last.shape[0]:
            return torch.empty(0, c.vocab)
        return self._head(kernels.rms_norm(last, self._norm, c.norm_eps).to(self.dtype)).float()


def groups(config: Mamba2Config, dtype: str, granularity: int) -> tuple[GroupGeometry, ...]:
    """One group: all layers keep a state, one a page."""
    c = config
    return (
        state_group(
            tuple(range(c.layers)),
            channels=c.channels,
            width=c.width,
            recurrent=(c.heads, c.head_dim, c.state),
            dtype=dtype,
            granularity=granularity,
        ),
    )


def read_config(raw: Mapping[str, Any]) -> Mamba2Config:
    refuse_quantised(raw)
    if raw.get("hidden_act", "silu") != "silu":
        raise ValueError(f"activation {raw['hidden_act']!r} in place of 'silu'")
    heads, head_dim = raw["num_heads"], raw["head_dim"]
    if heads * head_dim != raw["hidden_size"] * raw["expand"]:
        raise ValueError(f"{heads} heads of {head_dim} that are not {raw['expand']} times the hidden size")
    return Mamba2Config(
        architecture="mamba2",
        layers=raw["num_hidden_layers"],
        hidden=raw["hidden_size"],
        vocab=raw["vocab_size"],
        context_length=raw.get("max_position_embeddings") or _CONTEXT,
        rope_theta=0.0,
        norm_eps=float(raw["layer_norm_epsilon"]),
        tied=bool(raw.get("tie_word_embeddings", False)),
        heads=heads,
        head_dim=head_dim,
        state=raw["state_size"],
        groups=raw["n_groups"],
        width=raw["conv_kernel"],
        bias=bool(raw.get("use_bias", False)),
        conv_bias=bool(raw.get("use_conv_bias", True)),
        step_limits=_step_limits(raw.get("time_step_limit") or (0.0, math.inf)),
        wide_residual=bool(raw.get("residual_in_fp32", True)),
    )


def _step_limits(given: Any) -> tuple[float, float]:
    """transformers writes an infinite number as ``{"__float__": "Infinity"}``."""
    low, high = (float(limit["__float__"]) if isinstance(limit, Mapping) else float(limit) for limit in given)
    return low, high


FAMILY = Family(
    model_types=("mamba2",),
    read_config=read_config,
    tensor_shapes=tensor_shapes,
    groups=groups,
    build=Mamba2,
)
