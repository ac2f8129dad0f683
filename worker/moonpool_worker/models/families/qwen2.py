"""Qwen2 and Qwen2.5: llama with biases of q, k and v, and a window for the upper layers where one is used (2024)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moonpool_worker.models.decoder import Decoder, DecoderConfig, decoder_groups, decoder_shapes
from moonpool_worker.models.family import Family, GGUFForm
from moonpool_worker.models.gguf_names import GGUF_LAYER, GGUF_QKV_BIAS, GGUF_TOP, gguf_config
from moonpool_worker.models.read_config import decoder_fields, layer_types
from moonpool_worker.models.windows import Window, read_windows


def read_config(raw: Mapping[str, Any]) -> DecoderConfig:
    return DecoderConfig(architecture="qwen2", **decoder_fields(raw), windows=qwen_windows(raw), qkv_bias=True)


def qwen_windows(raw: Mapping[str, Any]) -> tuple[Window, ...]:
    """Qwen's configurations name a window that they do not use."""
    used = raw if raw.get("use_sliding_window") else {**raw, "sliding_window": None}
    return read_windows(layer_types(used, raw.get("max_window_layers", 0)), used["sliding_window"])


FAMILY = Family(
    model_types=("qwen2",),
    read_config=read_config,
    tensor_shapes=decoder_shapes,
    groups=decoder_groups,
    build=Decoder,
    gguf=(GGUFForm("qwen2", gguf_config, GGUF_LAYER | GGUF_QKV_BIAS, GGUF_TOP),),
)
