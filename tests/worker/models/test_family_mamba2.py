"""Mamba-2 beside transformers."""

from __future__ import annotations

from transformers import Mamba2Config

from tests.worker.models.family_case import FamilyChecks

SIZES = {"vocab_size": 128, "hidden_size": 32, "num_heads": 8, "head_dim": 8, "state_size": 16, "num_hidden_layers": 2}


class TestMamba2(FamilyChecks):
    config = Mamba2Config(**SIZES, n_groups=2)


class TestMamba2Biases(FamilyChecks):
    """What a configuration may change, tied embeddings among it."""

    config = Mamba2Config(**SIZES, n_groups=1, use_bias=True, use_conv_bias=False, tie_word_embeddings=True)
