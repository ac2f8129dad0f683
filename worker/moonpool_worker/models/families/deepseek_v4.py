"""DeepSeek-V4 (2026): attention over the last tokens and over compressed text, parallel residual streams, experts that
the first layers choose by token id.

Its caches are five groups, see :mod:`moonpool_worker.models.deepseek_v4.caches`. Checked beside transformers'
``DeepseekV4ForCausalLM``.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from moonpool_worker.engine.batch import StepBatch
from moonpool_worker.kernels.interface import Kernels
from moonpool_worker.models.deepseek_v4.attention import V4Attention, attention_shapes
from moonpool_worker.models.deepseek_v4.caches import groups
from moonpool_worker.models.deepseek_v4.config import DeepseekV4Config, read_config
from moonpool_worker.models.deepseek_v4.hyper_connections import (
    HyperConnection,
    HyperHead,
    connection_shapes,
    head_shapes,
)
from moonpool_worker.models.deepseek_v4.step import StepPlanner, V4Step
from moonpool_worker.models.family import Cache, Family
from moonpool_worker.models.mlp import GatedMLP
from moonpool_worker.models.moe import Experts, MixtureOfExperts, expert_shapes
from moonpool_worker.models.routing import Router
from moonpool_worker.models.rows import last_rows, token_ids
from moonpool_worker.weights.tensor_reader import TensorReader

_EMBEDDING, _NORM, _HEAD = "model.embed_tokens.weight", "model.norm.weight", "head.weight"
_STREAMS_HEAD = "model.hc_head.hc"
#: An expert's gate, up and down.
_EXPERT = ("w1", "w3", "w2")


def tensor_shapes(config: DeepseekV4Config) -> dict[str, tuple[int, ...]]:
    """Every tensor that the family needs, under the names that transformers writes: DeepSeek's own below ``model``."""
    c = config
    shapes: dict[str, tuple[int, ...]] = {_EMBEDDING: (c.vocab, c.hidden), _NORM: (c.hidden,)}
    shapes |= head_shapes(_STREAMS_HEAD, c.streams, c.hidden)
    if not c.tied:
        shapes[_HEAD] = (c.vocab, c.hidden)
    for number in range(c.layers):
        prefix = f"model.layers.{number}."
        shapes |= attention_shapes(c, number)
        for part in ("attn", "ffn"):
            shapes[f"{prefix}{part}_norm.weight"] = (c.hidden,)
            shapes |= connection_shapes(f"{prefix}hc_{part}", c.streams, c.hidden)
        shapes[f"{prefix}ffn.gate.weight"] = (c.experts, c.hidden)
        if c.hashed[number]:
            shapes[f"{prefix}ffn.gate.tid2eid"] = (c.vocab, c.routing.top_k)
        else:
            shapes[f"{prefix}ffn.gate.bias"] = (c.experts,)
        shapes |= expert_shapes(f"{prefix}ffn.experts.", c.experts, c.hidden, c.expert_ffn, _EXPERT)
        shared = dict.fromkeys(("w1", "w3"), (c.expert_ffn, c.hidden)) | {"w2": (c.hidden, c.expert_ffn)}
        shapes |= {f"{prefix}ffn.shared_experts.{name}.weight": shape for name, shape in shared.items()}
    return shapes


class _FeedForward:
    """Experts by router or, in the first layers, by the token's id; and one for every token."""

    def __init__(self, config: DeepseekV4Config, reader: TensorReader, kernels: Kernels, number: int) -> None:
        c, prefix = config, f"model.layers.{number}.ffn."
        # In float32: experts with nearly equal scores must not change places by rounding.
        weight = reader.read(f"{prefix}gate.weight", dtype=torch.float32)
        bias: torch.Tensor | None = None
        self._by_token: torch.Tensor | None = None
        if c.hashed[number]:
            self._by_token = reader.read(f"{prefix}gate.tid2eid", dtype=torch.int64)
        else:
            bias = reader.read(f"{prefix}gate.bias", dtype=torch.float32)
        self._router = Router(c.routing, weight, choice_bias=bias)
        self._limit = c.activation_limit
        experts = Experts.read(
            reader, kernels, f"{prefix}experts.", c.experts, names=_EXPERT, activation=self._activation
        )
        gate, up, down = (f"{prefix}shared_experts.{name}.weight" for name in _EXPERT)
        shared = GatedMLP(kernels.linear(reader.read(gate, up)), kernels.linear(reader.read(down)), self._activation)
        self._experts = MixtureOfExperts(self._router, experts, shared)

    def __call__(self, x: torch.Tensor, step: V4Step) -> torch.Tensor:
        """[T, hidden] → [T, hidden]."""
        if self._by_token is None:
            return self._experts(x)
        chosen = self._by_token[step.token_ids]
        return self._experts(x, self._router.weighted(self._router.scores(x), chosen))

    def _activation(self, gate_up: torch.Tensor) -> torch.Tensor:
        """SwiGLU of what is cut off at a limit."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate.clamp(max=self._limit)) * up.clamp(-self._limit, self._limit)


class _Layer:
    def __init__(self, config: DeepseekV4Config, reader: TensorReader, kernels: Kernels, number: int) -> None:
        c, prefix = config, f"model.layers.{number}."
        self._eps = c.norm_eps

        def around(part: str) -> tuple[HyperConnection, torch.Tensor]:
            connection = HyperConnection(
                reader, f"{prefix}hc_{part}", c.streams, c.sinkhorn_steps, c.streams_eps, c.norm_eps
            )
            return connection, reader.read(f"{prefix}{part}_norm.weight", dtype=torch.float32)

        self._around_attention, self._around_feed_forward = around("attn"), around("ffn")
        self._attention = V4Attention(c, reader, kernels, number)
        self._feed_forward = _FeedForward(c, reader, kernels, number)

    def __call__(self, x: torch.Tensor, step: V4Step) -> torch.Tensor:
        """Streams [T, N, hidden]."""
        for layer, (connection, norm) in (
            (self._attention, self._around_attention),
            (self._feed_forward, self._around_feed_forward),
        ):
            collapsed, after, mixing = connection.collapse(x)
            out = layer(step.kernels.rms_norm(collapsed, norm, self._eps), step)
            x = connection.spread(x, out, after, mixing)
        return x


class DeepseekV4Model:
    """Weights and forward pass. ``weight_bytes``: what the weights take in memory, a packed head included."""

    def __init__(self, config: DeepseekV4Config, reader: TensorReader, kernels: Kernels) -> None:
        self.config, self.dtype, self.kernels = config, reader.dtype, kernels
        self._embedding = reader.read(_EMBEDDING)
        self._norm = reader.read(_NORM, dtype=torch.float32)
        self._streams_head = HyperHead(reader, _STREAMS_HEAD, config.streams_eps, config.norm_eps)
        self._layers = [_Layer(config, reader, kernels, number) for number in range(config.layers)]
        self._head = kernels.linear(self._embedding if config.tied else reader.read(_HEAD))
        self._plan = StepPlanner(config, self._embedding.device)

    @property
    def weight_bytes(self) -> int:
        elements = sum(math.prod(shape) for shape in tensor_shapes(self.config).values())
        copied = self._embedding.numel() if self.config.tied else 0
        return (elements + copied) * self.dtype.itemsize

    def forward(self, batch: StepBatch, cache: Cache) -> torch.Tensor:
        """float32 logits [chunks that want them, vocab]."""
        ids = token_ids(batch, self._embedding.device)
        step = self._plan(batch, cache, self.kernels, ids)
        x = F.embedding(ids, self._embedding).unsqueeze(1).repeat(1, self.config.streams, 1)
        for layer in self._layers:
            x = layer(x, step)
        # Only the rows that are asked for go through the head: the vocabulary is the largest product.
        last = last_rows(batch, x)
        if not last.shape[0]:
            return torch.empty(0, self.config.vocab)
        return self._head(self.kernels.rms_norm(self._streams_head(last), self._norm, self.config.norm_eps)).float()


FAMILY = Family(
    model_types=("deepseek_v4",),
    read_config=read_config,
    tensor_shapes=tensor_shapes,
    groups=groups,
    build=DeepseekV4Model,
)
