"""Qwen3-Next and Qwen3.5 beside transformers."""

from __future__ import annotations

from transformers import Qwen3_5MoeTextConfig, Qwen3_5TextConfig, Qwen3NextConfig

from tests.worker.models.family_case import FamilyChecks

SIZES = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    # Shorter heads are sometimes nearly 0, which their norm blows up: transformers' own decode then differs by 2e-4.
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "max_position_embeddings": 128,
}
EXPERTS = {
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 20,
    "num_experts_per_tok": 2,
    "num_experts": 4,
}


class TestQwen3Next(FamilyChecks):
    """A layer without experts among those with them."""

    config = Qwen3NextConfig(**SIZES, **EXPERTS, num_hidden_layers=4, mlp_only_layers=[1])


class TestQwen35(FamilyChecks):
    config = Qwen3_5TextConfig(
        **SIZES, num_hidden_layers=3, layer_types=["linear_attention", "full_attention", "linear_attention"]
    )


class TestQwen35MoE(FamilyChecks):
    config = Qwen3_5MoeTextConfig(
        **{k: v for k, v in SIZES.items() if k != "intermediate_size"},
        **EXPERTS,
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
    )
