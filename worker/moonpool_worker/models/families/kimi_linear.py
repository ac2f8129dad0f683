"""Kimi Linear (2025): three layers of Kimi Delta Attention to one of latent attention without positions; experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from moonpool_api.geometry import GroupGeometry

from moonpool_worker.kernels.interface import Kernels
from moonpool_worker.models.family import Family
from moonpool_worker.models.hybrid import Hybrid, HybridConfig, Mixer, hybrid_shapes, read_layer_types
from moonpool_worker.models.kimi_delta import KimiDelta, KimiDeltaForm
from moonpool_worker.models.latent_attention import LatentAttention, LatentShape
from moonpool_worker.models.mlp import GatedMLP, mlp_shapes
from moonpool_worker.models.moe import Experts, MixtureOfExperts, expert_shapes
from moonpool_worker.models.read_config import refuse_quantised
from moonpool_worker.models.routing import Router, Routing
from moonpool_worker.models.step import FeedForward
from moonpool_worker.weights.tensor_reader import TensorReader

_EXPERT = ("w1", "w3", "w2")


@dataclass(frozen=True, slots=True, kw_only=True)
class KimiConfig(HybridConfig):
    """``sparse``: the layers with ``experts`` experts of ``expert_ffn`` and one of ``shared_ffn``; the others have
    feed-forward layers of ``ffn``, called ``dense``."""

    attention: LatentShape
    delta: KimiDeltaForm
    dense: str
    ffn: int
    sparse: tuple[bool, ...]
    experts: int
    expert_ffn: int
    shared_ffn: int
    routing: Routing


def tensor_shapes(config: KimiConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that the family needs, under Hugging Face's names."""
    c = config

    def layer(number: int, prefix: str) -> dict[str, tuple[int, ...]]:
        mixer = c.attention.tensors if c.attends[number] else c.delta.shapes
        shapes = mixer(f"{prefix}self_attn.")
        if not c.sparse[number]:
            return shapes | mlp_shapes(f"{prefix}{c.dense}.", c.hidden, c.ffn)
        moe = f"{prefix}block_sparse_moe."
        shapes |= {
            f"{moe}gate.weight": (c.experts, c.hidden),
            f"{moe}gate.e_score_correction_bias": (c.experts,),
        }
        shapes |= expert_shapes(f"{moe}experts.", c.experts, c.hidden, c.expert_ffn, _EXPERT)
        return shapes | mlp_shapes(f"{moe}shared_experts.", c.hidden, c.shared_ffn)

    return hybrid_shapes(c, layer)


def build(config: KimiConfig, reader: TensorReader, kernels: Kernels) -> Hybrid:
    c = config

    def mixer(number: int, prefix: str, group: int) -> Mixer:
        if c.attends[number]:
            return LatentAttention(c.attention, reader, kernels, f"{prefix}self_attn.", number, group)
        return KimiDelta(c.delta, reader, kernels, f"{prefix}self_attn.", number, group)

    def feed_forward(number: int, prefix: str) -> FeedForward:
        if not c.sparse[number]:
            return GatedMLP.read(reader, kernels, f"{prefix}{c.dense}.")
        moe = f"{prefix}block_sparse_moe."
        # In float32: experts with nearly equal scores must not change places by rounding.
        weight = reader.read(f"{moe}gate.weight", dtype=torch.float32)
        bias = reader.read(f"{moe}gate.e_score_correction_bias", dtype=torch.float32)
        experts = Experts.read(reader, kernels, f"{moe}experts.", c.experts, names=_EXPERT)
        shared = GatedMLP.read(reader, kernels, f"{moe}shared_experts.")
        return MixtureOfExperts(Router(c.routing, weight, choice_bias=bias), experts, shared)

    return Hybrid(c, reader, kernels, tensor_shapes(c), mixer, feed_forward)


def groups(config: KimiConfig, dtype: str, granularity: int) -> tuple[GroupGeometry, ...]:
    """Latent rows of the layers with attention, and the states of the others, one a page."""
    full, states = config.layers_of(attends=True), config.layers_of(attends=False)
    found = [config.attention.group(full, dtype, granularity)] if full else []
    return (*found, *([config.delta.group(states, dtype, granularity)] if states else []))


def read_config(raw: Mapping[str, Any]) -> KimiConfig:
    """As the model was published, or as transformers writes it, which has other keys for the same."""
    refuse_quantised(raw)
    if raw.get("attention_bias"):
        raise ValueError("biases in attention layers")
    if raw.get("hidden_act", "silu") != "silu":
        raise ValueError(f"activation {raw['hidden_act']!r} in place of 'silu'")
    if raw.get("num_nextn_predict_layers"):
        raise ValueError("layers that predict several tokens")
    layers, hidden, eps = raw["num_hidden_layers"], raw["hidden_size"], float(raw["rms_norm_eps"])
    linear = raw.get("linear_attn_config") or {
        "head_dim": raw["linear_head_dim"],
        "num_heads": raw["linear_num_heads"],
        "short_conv_kernel_size": raw["linear_conv_kernel_dim"],
    }
    plain, rope = raw["qk_nope_head_dim"], raw["qk_rope_head_dim"]
    expert_ffn = raw["moe_intermediate_size"]
    return KimiConfig(
        architecture=raw["model_type"],
        layers=layers,
        hidden=hidden,
        vocab=raw["vocab_size"],
        context_length=raw["model_max_length"],
        rope_theta=float(raw.get("rope_theta") or 10000.0),
        norm_eps=eps,
        tied=bool(raw.get("tie_word_embeddings", False)),
        attends=_attends(raw, linear, layers),
        attention=LatentShape(
            hidden=hidden,
            heads=raw["num_attention_heads"],
            q_rank=raw.get("q_lora_rank"),
            rank=raw["kv_lora_rank"],
            plain=plain,
            rope=rope,
            value=raw["v_head_dim"],
            scale=(plain + rope) ** -0.5,
            rotated="nothing",
        ),
        delta=KimiDeltaForm(
            hidden=hidden,
            heads=linear["num_heads"],
            head_dim=linear["head_dim"],
            width=linear["short_conv_kernel_size"],
            norm_eps=eps,
        ),
        # transformers writes its dense layers under the name of those with experts.
        dense="block_sparse_moe" if "mlp_layer_types" in raw else "mlp",
        ffn=raw["intermediate_size"],
        sparse=_sparse(raw, layers),
        experts=raw["num_experts"],
        expert_ffn=expert_ffn,
        shared_ffn=expert_ffn * raw["num_shared_experts"],
        routing=Routing(
            top_k=raw["num_experts_per_token"],
            score="sigmoid",
            normalised=bool(raw.get("moe_renormalize", True)),
            scale=float(raw.get("routed_scaling_factor", 1.0)),
            groups=raw.get("num_expert_group") or 1,
            top_groups=raw.get("topk_group") or 1,
            group_best=2,
        ),
    )


def _attends(raw: Mapping[str, Any], linear: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    if raw.get("layer_types"):
        return read_layer_types(raw)
    # Counted from 1.
    return tuple(number + 1 in linear["full_attn_layers"] for number in range(layers))


def _sparse(raw: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    """Which layers have experts."""
    if "mlp_layer_types" in raw:
        return tuple(kind == "sparse" for kind in raw["mlp_layer_types"])
    if raw.get("moe_layer_freq", 1) != 1:
        raise ValueError(f"dense layers among those with experts (moe_layer_freq {raw['moe_layer_freq']})")
    return tuple(number >= raw.get("first_k_dense_replace", 0) for number in range(layers))


FAMILY = Family(
    model_types=("kimi_linear",),
    read_config=read_config,
    tensor_shapes=tensor_shapes,
    groups=groups,
    build=build,
)
