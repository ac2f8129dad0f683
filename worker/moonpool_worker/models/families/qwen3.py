"""Qwen3, dense: llama with a norm of each head's query and key (2025)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moonpool_worker.models.decoder import Decoder, DecoderConfig, decoder_groups, decoder_shapes
from moonpool_worker.models.families.qwen2 import qwen_windows
from moonpool_worker.models.family import Family, GGUFForm
from moonpool_worker.models.gguf_names import GGUF_LAYER, GGUF_QK_NORM, GGUF_TOP, gguf_config
from moonpool_worker.models.read_config import decoder_fields


def read_config(raw: Mapping[str, Any]) -> DecoderConfig:
    bias = bool(raw.get("attention_bias", False))
    return DecoderConfig(
        architecture="qwen3",
        **decoder_fields(raw),
        windows=qwen_windows(raw),
        qk_norm=True,
        qkv_bias=bias,
        out_bias=bias,
    )


FAMILY = Family(
    model_types=("qwen3",),
    read_config=read_config,
    tensor_shapes=decoder_shapes,
    groups=decoder_groups,
    build=Decoder,
    gguf=(GGUFForm("qwen3", gguf_config, GGUF_LAYER | GGUF_QK_NORM, GGUF_TOP),),
)
