"""Qwen3-Next (2025) and the text models of Qwen3.5 (2026): three layers of Gated DeltaNet to one of gated attention.

Qwen3-Next and the MoE of Qwen3.5 have experts, and one more that all tokens go through, behind a gate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from moonpool_api.geometry import GroupGeometry

from moonpool_worker.kernels.interface import Kernels
from moonpool_worker.models.family import Family
from moonpool_worker.models.gated_attention import GatedAttention, GatedAttentionForm
from moonpool_worker.models.gated_delta_net import DeltaNetForm, GatedDeltaNet
from moonpool_worker.models.hybrid import Hybrid, HybridConfig, Mixer, hybrid_shapes, read_layer_types
from moonpool_worker.models.mlp import GatedMLP, mlp_shapes
from moonpool_worker.models.moe import Experts, MixtureOfExperts, expert_shapes
from moonpool_worker.models.read_config import refuse_quantised
from moonpool_worker.models.rope import read_rope
from moonpool_worker.models.routing import Router, Routing
from moonpool_worker.models.step import FeedForward
from moonpool_worker.weights.tensor_reader import TensorReader


@dataclass(frozen=True, slots=True, kw_only=True)
class QwenHybridConfig(HybridConfig):
    """``sparse``: the layers with ``experts`` experts of ``expert_ffn`` and one of ``shared_ffn``; the others have
    feed-forward layers of ``ffn``."""

    attention: GatedAttentionForm
    delta: DeltaNetForm
    ffn: int
    sparse: tuple[bool, ...]
    experts: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    routing: Routing | None = None


def tensor_shapes(config: QwenHybridConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that the family needs, under Hugging Face's names."""
    c = config

    def layer(number: int, prefix: str) -> dict[str, tuple[int, ...]]:
        if c.attends[number]:
            shapes = c.attention.shapes(f"{prefix}self_attn.")
        else:
            shapes = c.delta.shapes(f"{prefix}linear_attn.")
        mlp = f"{prefix}mlp."
        if not c.sparse[number]:
            return shapes | mlp_shapes(mlp, c.hidden, c.ffn)
        shapes |= {f"{mlp}gate.weight": (c.experts, c.hidden), f"{mlp}shared_expert_gate.weight": (1, c.hidden)}
        shapes |= expert_shapes(f"{mlp}experts.", c.experts, c.hidden, c.expert_ffn)
        return shapes | mlp_shapes(f"{mlp}shared_expert.", c.hidden, c.shared_ffn)

    return hybrid_shapes(c, layer)


def build(config: QwenHybridConfig, reader: TensorReader, kernels: Kernels) -> Hybrid:
    c = config

    def mixer(number: int, prefix: str, group: int) -> Mixer:
        if c.attends[number]:
            return GatedAttention(c.attention, reader, kernels, f"{prefix}self_attn.", number, group)
        return GatedDeltaNet(c.delta, reader, kernels, f"{prefix}linear_attn.", number, group)

    def feed_forward(number: int, prefix: str) -> FeedForward:
        mlp = f"{prefix}mlp."
        if not c.sparse[number] or c.routing is None:
            return GatedMLP.read(reader, kernels, mlp)
        # In float32: experts with nearly equal scores must not change places by rounding.
        router = Router(c.routing, reader.read(f"{mlp}gate.weight", dtype=torch.float32))
        experts = Experts.read(reader, kernels, f"{mlp}experts.", c.experts)
        shared = GatedMLP.read(reader, kernels, f"{mlp}shared_expert.")
        return MixtureOfExperts(router, experts, shared, reader.read(f"{mlp}shared_expert_gate.weight"))

    return Hybrid(c, reader, kernels, tensor_shapes(c), mixer, feed_forward)


def groups(config: QwenHybridConfig, dtype: str, granularity: int) -> tuple[GroupGeometry, ...]:
    """Rows of the layers with attention, and the states of the others, one a page."""
    full, states = config.layers_of(attends=True), config.layers_of(attends=False)
    found = [config.attention.group(full, dtype, granularity)] if full else []
    return (*found, *([config.delta.group(states, dtype, granularity)] if states else []))


def read_config(raw: Mapping[str, Any]) -> QwenHybridConfig:
    refuse_quantised(raw)
    if raw.get("attention_bias"):
        raise ValueError("biases in attention layers")
    if raw.get("hidden_act", "silu") != "silu":
        raise ValueError(f"activation {raw['hidden_act']!r} in place of 'silu'")
    interleaved = raw["model_type"] == "qwen3_next"
    layers, hidden, eps = raw["num_hidden_layers"], raw["hidden_size"], float(raw["rms_norm_eps"])
    theta, scaling = read_rope(raw)
    head_dim = raw.get("head_dim") or hidden // raw["num_attention_heads"]
    rope = raw.get("rope_parameters") or {}
    part = float(raw.get("partial_rotary_factor", rope.get("partial_rotary_factor", 0.25)))
    sparse = _sparse(raw, layers)
    experts: dict[str, Any] = {}
    if any(sparse):
        experts = {
            "experts": raw["num_experts"],
            "expert_ffn": raw["moe_intermediate_size"],
            "shared_ffn": raw["shared_expert_intermediate_size"],
            "routing": Routing(
                top_k=raw["num_experts_per_tok"], score="softmax", normalised=bool(raw.get("norm_topk_prob", True))
            ),
        }
    attention = GatedAttentionForm(
        hidden=hidden,
        heads=raw["num_attention_heads"],
        kv_heads=raw["num_key_value_heads"],
        head_dim=head_dim,
        rotary=int(head_dim * part),
        norm_eps=eps,
        norm_offset=1.0,
    )
    return QwenHybridConfig(
        architecture=raw["model_type"],
        layers=layers,
        hidden=hidden,
        vocab=raw["vocab_size"],
        context_length=raw["max_position_embeddings"],
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=eps,
        tied=bool(raw.get("tie_word_embeddings", False)),
        attends=_attends(raw, layers),
        rotary=attention.rotary,
        norm_offset=1.0,
        attention=attention,
        delta=DeltaNetForm(
            hidden=hidden,
            key_heads=raw["linear_num_key_heads"],
            value_heads=raw["linear_num_value_heads"],
            key_dim=raw["linear_key_head_dim"],
            value_dim=raw["linear_value_head_dim"],
            width=raw["linear_conv_kernel_dim"],
            norm_eps=eps,
            interleaved=interleaved,
        ),
        ffn=0 if all(sparse) else raw["intermediate_size"],
        sparse=sparse,
        **experts,
    )


def _attends(raw: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    if raw.get("layer_types"):
        return read_layer_types(raw)
    every = raw.get("full_attention_interval", 4)
    return tuple((number + 1) % every == 0 for number in range(layers))


def _sparse(raw: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    """Which layers have experts."""
    if not raw.get("num_experts"):
        return (False,) * layers
    dense, every = raw.get("mlp_only_layers") or [], raw.get("decoder_sparse_step", 1)
    return tuple(number not in dense and (number + 1) % every == 0 for number in range(layers))


#: Published checkpoints hold a head that predicts a second token (MTP).
FAMILY = Family(
    model_types=("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"),
    read_config=read_config,
    tensor_shapes=tensor_shapes,
    groups=groups,
    build=build,
    unused=lambda config, name: name.startswith("mtp."),
)
