"""Qwen3 with experts in place of most feed-forward layers (2025)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from moonpool_worker.kernels.interface import Kernels
from moonpool_worker.models.decoder import (
    Decoder,
    DecoderConfig,
    decoder_groups,
    decoder_shapes,
    dense_shapes,
    read_dense,
)
from moonpool_worker.models.family import Family, GGUFForm
from moonpool_worker.models.gguf_names import GGUF_EXPERTS, GGUF_LAYER, GGUF_QK_NORM, GGUF_TOP, gguf_config
from moonpool_worker.models.moe import Experts, MixtureOfExperts, expert_shapes
from moonpool_worker.models.read_config import decoder_fields
from moonpool_worker.models.routing import Router, Routing
from moonpool_worker.models.step import FeedForward
from moonpool_worker.weights.tensor_reader import TensorReader


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3MoeConfig(DecoderConfig):
    """``dense``: the layers without experts."""

    experts: int
    expert_ffn: int
    routing: Routing
    dense: frozenset[int]


def read_config(raw: Mapping[str, Any]) -> Qwen3MoeConfig:
    fields = decoder_fields(raw)
    window = raw.get("sliding_window") if raw.get("use_sliding_window") else None
    bias = bool(raw.get("attention_bias", False))
    every, only = raw.get("decoder_sparse_step", 1), raw.get("mlp_only_layers") or []
    return Qwen3MoeConfig(
        architecture="qwen3_moe",
        **fields,
        windows=(window,) * fields["layers"],
        qk_norm=True,
        qkv_bias=bias,
        out_bias=bias,
        experts=raw["num_local_experts"] if "num_local_experts" in raw else raw["num_experts"],
        expert_ffn=raw["moe_intermediate_size"],
        routing=Routing(top_k=raw["num_experts_per_tok"], normalised=bool(raw.get("norm_topk_prob", False))),
        dense=frozenset(number for number in range(fields["layers"]) if number in only or (number + 1) % every),
    )


def feed_forward_shapes(config: Qwen3MoeConfig, number: int) -> dict[str, tuple[int, ...]]:
    if number in config.dense:
        return dense_shapes(config, number)
    prefix = f"model.layers.{number}.mlp."
    experts = expert_shapes(f"{prefix}experts.", config.experts, config.hidden, config.expert_ffn)
    return {f"{prefix}gate.weight": (config.experts, config.hidden)} | experts


def read_feed_forward(config: Qwen3MoeConfig, reader: TensorReader, kernels: Kernels, number: int) -> FeedForward:
    if number in config.dense:
        return read_dense(config, reader, kernels, number)
    prefix = f"model.layers.{number}.mlp."
    router = Router(config.routing, reader.read(f"{prefix}gate.weight", dtype=torch.float32))
    return MixtureOfExperts(router, Experts.read(reader, kernels, f"{prefix}experts.", config.experts))


def _gguf_config(get: Callable[..., Any]) -> dict[str, Any]:
    """The files do not say that weights are normalised: they are in all models that there are."""
    return gguf_config(get) | {
        "num_experts": int(get("expert_count")),
        "num_experts_per_tok": int(get("expert_used_count")),
        "moe_intermediate_size": int(get("expert_feed_forward_length")),
        "norm_topk_prob": True,
    }


FAMILY = Family(
    model_types=("qwen3_moe",),
    read_config=read_config,
    tensor_shapes=functools.partial(decoder_shapes, feed_forward=feed_forward_shapes),
    groups=decoder_groups,
    build=functools.partial(Decoder, shapes=feed_forward_shapes, feed_forward=read_feed_forward),
    gguf=(GGUFForm("qwen3moe", _gguf_config, GGUF_LAYER | GGUF_QK_NORM | GGUF_EXPERTS, GGUF_TOP),),
)
