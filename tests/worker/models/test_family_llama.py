"""llama beside transformers, with plain RoPE and with each way to stretch it."""

from __future__ import annotations

from typing import Any

from transformers import LlamaConfig

from tests.worker.models.family_case import FamilyChecks


def config(**rope: Any) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        rope_parameters={"rope_theta": 100.0, **rope} if rope else None,
    )


class TestLlama(FamilyChecks):
    config = config()


class TestLinearRope(FamilyChecks):
    config = config(rope_type="linear", factor=3.0)


class TestLlama3Rope(FamilyChecks):
    # Of the four frequencies one is kept, one blended, and two are stretched.
    config = config(
        rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32
    )


class TestYarnRope(FamilyChecks):
    config = config(
        rope_type="yarn", factor=4.0, original_max_position_embeddings=32, beta_fast=4.0, beta_slow=0.5, truncate=False
    )
