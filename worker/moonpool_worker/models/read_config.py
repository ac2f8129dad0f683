"""The fields that the configurations of most decoders have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from moonpool_worker.models.rope import read_rope


def decoder_fields(raw: Mapping[str, Any], *, activation: str = "silu") -> dict[str, Any]:
    """Of a ``config.json``, as :class:`DecoderConfig` has them. KeyError for what is missing, ValueError for what is
    not supported; ``activation`` is the one that the family computes."""
    refuse_quantised(raw)
    found = raw.get("hidden_activation", raw.get("hidden_act", activation))
    if found != activation:
        raise ValueError(f"activation {found!r} in place of {activation!r}")
    heads, hidden = raw["num_attention_heads"], raw["hidden_size"]
    theta, scaling = read_rope(raw)
    return {
        "layers": raw["num_hidden_layers"],
        "hidden": hidden,
        "heads": heads,
        "kv_heads": raw.get("num_key_value_heads") or heads,
        "head_dim": raw.get("head_dim") or hidden // heads,
        "ffn": raw["intermediate_size"],
        "vocab": raw["vocab_size"],
        "context_length": raw["max_position_embeddings"],
        "rope_theta": theta,
        "rope_scaling": scaling,
        "norm_eps": float(raw["rms_norm_eps"]),
        "tied": bool(raw.get("tie_word_embeddings", False)),
    }


def refuse_quantised(raw: Mapping[str, Any]) -> None:
    """ValueError for weights that a quantisation library must unpack."""
    quantization = raw.get("quantization_config")
    if quantization:
        method = str(quantization.get("quant_method", "unknown"))
        raise ValueError(f"weights quantised as {method}: use a checkpoint in bfloat16, or a GGUF file")


def layer_types(raw: Mapping[str, Any], first_sliding: int) -> Sequence[str]:
    """``layer_types`` of a configuration; where it has none, layers slide from ``first_sliding`` on if any do."""
    found = raw.get("layer_types")
    if found:
        return found
    count = raw["num_hidden_layers"]
    plain = min(first_sliding, count) if raw.get("sliding_window") else count
    return ["full_attention"] * plain + ["sliding_attention"] * (count - plain)
