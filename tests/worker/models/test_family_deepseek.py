"""DeepSeek-V2 and V3 beside transformers."""

from __future__ import annotations

from typing import Any

import pytest
from moonpool_worker.models.families.deepseek import read_config
from transformers import DeepseekV2Config, DeepseekV3Config

from tests.worker.models.family_case import FamilyChecks

_SMALL: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 128,
}
#: As DeepSeek's own: stretched far, with a temperature.
_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 4,
    "beta_slow": 1,
    "mscale": 0.707,
    "mscale_all_dim": 0.9,
}


class TestDeepseekV2(FamilyChecks):
    config = DeepseekV2Config(
        **_SMALL,
        topk_method="group_limited_greedy",
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.0,
        rope_parameters=_YARN,
    )


class TestDeepseekV2Lite(FamilyChecks):
    """No low-rank query, greedy choice, plain RoPE."""

    config = DeepseekV2Config(**_SMALL | {"q_lora_rank": None}, topk_method="greedy")


class TestDeepseekV3(FamilyChecks):
    config = DeepseekV3Config(**_SMALL, n_group=4, topk_group=2, routed_scaling_factor=2.5, rope_parameters=_YARN)


class TestDeepseekV3Halves(FamilyChecks):
    """RoPE of halves, experts in one group, weights not normalised, no dense layer."""

    config = DeepseekV3Config(
        **_SMALL | {"q_lora_rank": None, "first_k_dense_replace": 0},
        n_group=1,
        topk_group=1,
        norm_topk_prob=False,
        rope_interleave=False,
    )


@pytest.mark.parametrize(
    "change",
    [
        {"attention_bias": True},
        {"moe_layer_freq": 2},
        {"topk_method": "noaux_tc"},
        {"quantization_config": {"quant_method": "fp8"}},
    ],
    ids=str,
)
def test_what_is_not_supported_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"bias|dense layers|noaux_tc|fp8"):
        read_config(DeepseekV2Config(**_SMALL).to_dict() | change)
