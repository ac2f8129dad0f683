"""Qwen3-MoE beside transformers, with a dense layer among those with experts."""

from __future__ import annotations

from transformers import Qwen3MoeConfig

from tests.worker.models.family_case import FamilyChecks


def config(normalised: bool) -> Qwen3MoeConfig:
    return Qwen3MoeConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=24,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        num_experts=8,
        num_experts_per_tok=3,
        norm_topk_prob=normalised,
        mlp_only_layers=[1],
    )


class TestQwen3Moe(FamilyChecks):
    config = config(normalised=True)


class TestQwen3MoeUnnormalised(FamilyChecks):
    config = config(normalised=False)
