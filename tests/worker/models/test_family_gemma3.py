"""Gemma 3 beside transformers: several windows long, with both bases of RoPE, the far one scaled as in the larger
models."""

from __future__ import annotations

from transformers import Gemma3TextConfig

from tests.worker.models.family_case import FamilyCase, FamilyChecks


class TestGemma3(FamilyChecks):
    config = Gemma3TextConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=16,
        query_pre_attn_scalar=24,
        max_position_embeddings=128,
        sliding_window=18,
        layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        },
    )

    def test_groups(self, case: FamilyCase) -> None:
        full, window = case.geometry.groups
        assert (full.name, full.window, full.layers) == ("full", None, (2,))
        assert (window.name, window.window, window.layers) == ("window", 18, (0, 1, 3))
