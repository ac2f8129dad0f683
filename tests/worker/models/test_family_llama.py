"""llama beside transformers."""

from __future__ import annotations

from transformers import LlamaConfig

from tests.worker.models.family_case import FamilyChecks


class TestLlama(FamilyChecks):
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
