"""Gemma 3, text: most layers look back over a window, every sixth at everything (Gemma Team, 2025).

Norms of queries, keys and of what attention and feed-forward give; two bases of RoPE; a GELU gate. Norms are stored
less 1 in safetensors and as they are in GGUF files.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from moonpool_worker.models.config import ModelConfig
from moonpool_worker.models.decoder import Decoder, DecoderConfig, decoder_groups, decoder_shapes
from moonpool_worker.models.family import Family, GGUFForm
from moonpool_worker.models.gguf_names import GGUF_LAYER, GGUF_QK_NORM, GGUF_TOP, gguf_config
from moonpool_worker.models.read_config import decoder_fields
from moonpool_worker.models.rope import read_scaling
from moonpool_worker.models.windows import read_windows

_GLOBAL_THETA, _LOCAL_THETA = 1e6, 1e4
_PATTERN = 6


def read_config(raw: Mapping[str, Any]) -> DecoderConfig:
    for name in ("final_logit_softcapping", "attn_logit_softcapping", "use_bidirectional_attention", "attention_bias"):
        if raw.get(name):
            raise ValueError(f"{name} in Gemma 3")
    far, near = _rope(raw)
    plain = {**raw, "rope_parameters": far, "rope_scaling": None, "rope_theta": far["rope_theta"]}
    fields = decoder_fields({"tie_word_embeddings": True, **plain}, activation="gelu_pytorch_tanh")
    fields["rope_scaling"] = {**fields["rope_scaling"], "window_theta": near}
    return DecoderConfig(
        architecture="gemma3_text",
        **fields,
        windows=read_windows(_layer_types(raw), raw.get("sliding_window")),
        qk_norm=True,
        attention_scale=raw.get("query_pre_attn_scalar", 256) ** -0.5,
        activation="gelu_tanh",
        sandwich_norms=True,
        norm_offset=1.0,
        embedding_scale=math.sqrt(fields["hidden"]),
    )


def _rope(raw: Mapping[str, Any]) -> tuple[dict[str, Any], float]:
    """RoPE of the layers without a window, and theta of those with one. In old configurations, and in GGUF files, only
    the former is scaled; new ones say it by the type of layer."""
    by_type = raw.get("rope_parameters") or {}
    near = by_type.get("sliding_attention") or {}
    if read_scaling(near, raw["max_position_embeddings"]):
        raise ValueError("scaled RoPE of the layers with a window")
    far = dict(by_type.get("full_attention") or raw.get("rope_scaling") or {})
    far.setdefault("rope_theta", raw.get("rope_theta") or _GLOBAL_THETA)
    return far, float(near.get("rope_theta") or raw.get("rope_local_base_freq") or _LOCAL_THETA)


def _layer_types(raw: Mapping[str, Any]) -> list[str]:
    if raw.get("layer_types"):
        return raw["layer_types"]
    pattern = raw.get("sliding_window_pattern") or raw.get("_sliding_window_pattern") or _PATTERN
    return [
        "sliding_attention" if (number + 1) % pattern else "full_attention"
        for number in range(raw["num_hidden_layers"])
    ]


def _gguf_config(get: Callable[..., Any]) -> dict[str, Any]:
    sizes = gguf_config(get)
    return sizes | {
        "rope_theta": float(get("rope.freq_base", _GLOBAL_THETA)),
        "rope_local_base_freq": float(get("rope.freq_base_swa", _LOCAL_THETA)),
        "sliding_window": int(get("attention.sliding_window")),
        # The files do not say it. It is the head's size in all models but the one of 27B parameters.
        "query_pre_attn_scalar": sizes["hidden_size"] // sizes["num_attention_heads"]
        if sizes["num_hidden_layers"] == 62
        else sizes["head_dim"],
    }


def _undo(name: str, config: ModelConfig) -> Callable[[np.ndarray], np.ndarray] | None:
    return (lambda weight: weight - 1) if name.endswith("norm.weight") else None


_GGUF_NORMS = {
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "ffn_norm.weight": "pre_feedforward_layernorm.weight",
    "post_ffw_norm.weight": "post_feedforward_layernorm.weight",
}

FAMILY = Family(
    model_types=("gemma3_text",),
    read_config=read_config,
    tensor_shapes=decoder_shapes,
    groups=decoder_groups,
    build=Decoder,
    gguf=(GGUFForm("gemma3", _gguf_config, GGUF_LAYER | GGUF_QK_NORM | _GGUF_NORMS, GGUF_TOP, _undo),),
)
