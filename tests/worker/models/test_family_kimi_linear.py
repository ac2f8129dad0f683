"""Kimi Linear beside transformers."""

from __future__ import annotations

from transformers import KimiLinearConfig

from tests.worker.models.family_case import FamilyChecks


class TestKimiLinear(FamilyChecks):
    """A dense layer first, then experts in groups."""

    config = KimiLinearConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=12,
        num_experts=8,
        num_experts_per_token=2,
        num_expert_group=4,
        topk_group=2,
        linear_head_dim=16,
        linear_num_heads=4,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        model_max_length=128,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
