"""DeepSeek-V2 (2024) and DeepSeek-V3 (2024): latent attention and fine-grained experts, some shared by all tokens.

The two differ in how a token's experts are chosen. Their first layers are dense.
"""

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
from moonpool_worker.models.latent_attention import LatentAttention, LatentShape
from moonpool_worker.models.mlp import GatedMLP, mlp_shapes
from moonpool_worker.models.moe import Experts, MixtureOfExperts, expert_shapes
from moonpool_worker.models.read_config import refuse_quantised
from moonpool_worker.models.rope import Scaling, read_rope, rope_table, yarn_mscale
from moonpool_worker.models.routing import Router, Routing
from moonpool_worker.models.rows import last_rows, positions, token_ids
from moonpool_worker.models.step import FeedForward, Step
from moonpool_worker.weights.tensor_reader import TensorReader

_EMBEDDING, _NORM, _HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekConfig(ModelConfig):
    """``dense_layers``: the first ones, with feed-forward layers of ``ffn``; the others have ``experts`` experts of
    ``expert_ffn`` and one of ``shared_ffn`` that every token goes through. ``choice_bias``: the router has one."""

    attention: LatentShape
    dense_layers: int
    ffn: int
    experts: int
    expert_ffn: int
    shared_ffn: int
    routing: Routing
    choice_bias: bool


def tensor_shapes(config: DeepseekConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that the family needs, under Hugging Face's names."""
    c = config
    shapes: dict[str, tuple[int, ...]] = {_EMBEDDING: (c.vocab, c.hidden), _NORM: (c.hidden,)}
    if not c.tied:
        shapes[_HEAD] = (c.vocab, c.hidden)
    for number in range(c.layers):
        prefix = f"model.layers.{number}."
        shapes |= c.attention.tensors(f"{prefix}self_attn.")
        shapes |= {f"{prefix}{name}.weight": (c.hidden,) for name in ("input_layernorm", "post_attention_layernorm")}
        if number < c.dense_layers:
            shapes |= mlp_shapes(f"{prefix}mlp.", c.hidden, c.ffn)
            continue
        shapes[f"{prefix}mlp.gate.weight"] = (c.experts, c.hidden)
        if c.choice_bias:
            shapes[f"{prefix}mlp.gate.e_score_correction_bias"] = (c.experts,)
        shapes |= expert_shapes(f"{prefix}mlp.experts.", c.experts, c.hidden, c.expert_ffn)
        shapes |= mlp_shapes(f"{prefix}mlp.shared_experts.", c.hidden, c.shared_ffn)
    return shapes


class _Layer:
    def __init__(self, config: DeepseekConfig, reader: TensorReader, kernels: Kernels, number: int) -> None:
        prefix = f"model.layers.{number}."
        self._eps = config.norm_eps
        self._input_norm = reader.read(f"{prefix}input_layernorm.weight")
        self._attention = LatentAttention(config.attention, reader, kernels, f"{prefix}self_attn.", number, 0)
        self._post_norm = reader.read(f"{prefix}post_attention_layernorm.weight")
        self._feed_forward = _feed_forward(config, reader, kernels, number)

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """``x`` [T, hidden], which may be overwritten by the result."""
        kernels = step.kernels
        attended = self._attention(kernels.rms_norm(x, self._input_norm, self._eps), step)
        h, x = kernels.add_rms_norm(attended, x, self._post_norm, self._eps)
        return x.add_(self._feed_forward(h))


def _feed_forward(config: DeepseekConfig, reader: TensorReader, kernels: Kernels, number: int) -> FeedForward:
    prefix = f"model.layers.{number}.mlp."
    if number < config.dense_layers:
        return GatedMLP.read(reader, kernels, prefix)
    # In float32: experts with nearly equal scores must not change places by rounding.
    weight = reader.read(f"{prefix}gate.weight", dtype=torch.float32)
    bias = None
    if config.choice_bias:
        bias = reader.read(f"{prefix}gate.e_score_correction_bias", dtype=torch.float32)
    experts = Experts.read(reader, kernels, f"{prefix}experts.", config.experts)
    shared = GatedMLP.read(reader, kernels, f"{prefix}shared_experts.")
    return MixtureOfExperts(Router(config.routing, weight, choice_bias=bias), experts, shared)


class DeepseekModel:
    """Weights and forward pass. ``weight_bytes``: what the weights take in memory, a packed head included."""

    def __init__(self, config: DeepseekConfig, reader: TensorReader, kernels: Kernels) -> None:
        self.config, self.dtype, self.kernels = config, reader.dtype, kernels
        self._embedding = reader.read(_EMBEDDING)
        self._norm = reader.read(_NORM)
        self._layers = [_Layer(config, reader, kernels, number) for number in range(config.layers)]
        self._head = kernels.linear(self._embedding if config.tied else reader.read(_HEAD))
        rotated = config.attention.rope
        cos, sin = rope_table(rotated, config.context_length, config.rope_theta, self.dtype, config.rope_scaling)
        self._cos, self._sin = cos.to(self._embedding.device), sin.to(self._embedding.device)

    @property
    def weight_bytes(self) -> int:
        elements = sum(math.prod(shape) for shape in tensor_shapes(self.config).values())
        copied = self._embedding.numel() if self.config.tied else 0
        return (elements + copied) * self.dtype.itemsize

    def forward(self, batch: StepBatch, cache: Cache) -> torch.Tensor:
        """float32 logits [chunks that want them, vocab]."""
        kernels, device = self.kernels, self._embedding.device
        x = F.embedding(token_ids(batch, device), self._embedding)
        where = positions(batch, device)
        angles = self._cos[where].unsqueeze(1), self._sin[where].unsqueeze(1)
        step = Step.begin(batch, cache, kernels, [angles], device)
        for layer in self._layers:
            x = layer(x, step)
        # Only the rows that are asked for go through the head: the vocabulary is the largest product.
        last = last_rows(batch, x)
        if not last.shape[0]:
            return torch.empty(0, self.config.vocab)
        return self._head(kernels.rms_norm(last, self._norm, self.config.norm_eps)).float()


def groups(config: DeepseekConfig, dtype: str, granularity: int) -> tuple[GroupGeometry, ...]:
    """One group: all layers keep a latent row per token of all of the text."""
    return (config.attention.group(tuple(range(config.layers)), dtype, granularity),)


def read_config(raw: Mapping[str, Any]) -> DeepseekConfig:
    refuse_quantised(raw)
    if raw.get("attention_bias") or raw.get("mlp_bias"):
        raise ValueError("biases in attention or feed-forward layers")
    if raw.get("moe_layer_freq", 1) != 1:
        raise ValueError(f"dense layers among those with experts (moe_layer_freq {raw['moe_layer_freq']})")
    second = raw["model_type"] == "deepseek_v2"
    theta, scaling = read_rope(raw)
    plain, rope = raw["qk_nope_head_dim"], raw["qk_rope_head_dim"]
    return DeepseekConfig(
        architecture=raw["model_type"],
        layers=raw["num_hidden_layers"],
        hidden=raw["hidden_size"],
        vocab=raw["vocab_size"],
        context_length=raw["max_position_embeddings"],
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=float(raw["rms_norm_eps"]),
        tied=bool(raw.get("tie_word_embeddings", False)),
        attention=LatentShape(
            hidden=raw["hidden_size"],
            heads=raw["num_attention_heads"],
            q_rank=raw.get("q_lora_rank"),
            rank=raw["kv_lora_rank"],
            plain=plain,
            rope=rope,
            value=raw["v_head_dim"],
            scale=(plain + rope) ** -0.5 * _temperature(scaling),
            rotated="neighbours" if second or raw.get("rope_interleave", True) else "halves",
        ),
        dense_layers=raw.get("first_k_dense_replace", 0),
        ffn=raw["intermediate_size"],
        experts=raw["n_routed_experts"],
        expert_ffn=raw["moe_intermediate_size"],
        shared_ffn=raw["moe_intermediate_size"] * raw["n_shared_experts"],
        routing=_softmax_routing(raw) if second else _sigmoid_routing(raw),
        choice_bias=not second,
    )


def _temperature(scaling: Scaling) -> float:
    """What YaRN multiplies the scores by where the configuration gives ``mscale_all_dim``."""
    weight = float(scaling.get("mscale_all_dim", 0))
    return yarn_mscale(float(scaling["factor"]), weight) ** 2 if weight else 1.0


def _softmax_routing(raw: Mapping[str, Any]) -> Routing:
    method = raw.get("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise ValueError(f"choice of experts by {method!r}")
    limited = method == "group_limited_greedy"
    return Routing(
        top_k=raw["num_experts_per_tok"],
        score="softmax",
        normalised=False,
        scale=float(raw.get("routed_scaling_factor", 1.0)),
        groups=raw["n_group"] if limited else 1,
        top_groups=raw["topk_group"] if limited else 1,
        group_best=1,
    )


def _sigmoid_routing(raw: Mapping[str, Any]) -> Routing:
    return Routing(
        top_k=raw["num_experts_per_tok"],
        score="sigmoid",
        normalised=bool(raw.get("norm_topk_prob", True)),
        scale=float(raw.get("routed_scaling_factor", 1.0)),
        groups=raw.get("n_group") or 1,
        top_groups=raw.get("topk_group") or 1,
        group_best=2,
    )


#: Published checkpoints hold one layer more, which predicts a second token (MTP).
FAMILY = Family(
    model_types=("deepseek_v2", "deepseek_v3"),
    read_config=read_config,
    tensor_shapes=tensor_shapes,
    groups=groups,
    build=DeepseekModel,
    unused=lambda config, name: name.startswith(f"model.layers.{config.layers}."),
)
