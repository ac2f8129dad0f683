"""Mistral beside transformers: every layer looks back over a window that is no multiple of a page."""

from __future__ import annotations

from transformers import MistralConfig

from tests.worker.models.family_case import FamilyCase, FamilyChecks


class TestMistral(FamilyChecks):
    config = MistralConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        sliding_window=21,
    )

    def test_one_group_with_the_window(self, case: FamilyCase) -> None:
        (group,) = case.geometry.groups
        assert (group.window, group.layers) == (21, (0, 1, 2))
