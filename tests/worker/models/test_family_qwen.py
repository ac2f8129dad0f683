"""Qwen2 and Qwen3 beside transformers, Qwen2 also with a window for its upper layers."""

from __future__ import annotations

from typing import Any

from transformers import Qwen2Config, Qwen3Config

from tests.worker.models.family_case import FamilyChecks

_SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


class TestQwen2(FamilyChecks):
    config = Qwen2Config(**_SIZES, tie_word_embeddings=True)


class TestQwen2Sliding(FamilyChecks):
    config = Qwen2Config(**_SIZES, use_sliding_window=True, sliding_window=19, max_window_layers=1)


class TestQwen3(FamilyChecks):
    # A head's size apart from hidden / heads, as in Qwen3's small models.
    config = Qwen3Config(**_SIZES, head_dim=16)


class TestQwen3Biased(FamilyChecks):
    config = Qwen3Config(**_SIZES, head_dim=16, attention_bias=True)
