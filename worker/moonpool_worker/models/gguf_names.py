"""What a plain decoder's metadata and tensors are called in GGUF files; families with more of them add theirs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

GGUF_LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
GGUF_QKV_BIAS = {f"attn_{name}.bias": f"self_attn.{name}_proj.bias" for name in "qkv"}
GGUF_QK_NORM = {f"attn_{name}_norm.weight": f"self_attn.{name}_norm.weight" for name in "qk"}
GGUF_EXPERTS = {
    "ffn_gate_inp.weight": "mlp.gate.weight",
    "ffn_gate_exps.weight": "mlp.experts.{expert}.gate_proj.weight",
    "ffn_up_exps.weight": "mlp.experts.{expert}.up_proj.weight",
    "ffn_down_exps.weight": "mlp.experts.{expert}.down_proj.weight",
}
GGUF_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


def gguf_config(get: Callable[..., Any]) -> dict[str, Any]:
    """A decoder's sizes as ``config.json`` would have them; ``get`` as in :class:`GGUFForm`."""
    heads, hidden = int(get("attention.head_count")), int(get("embedding_length"))
    return {
        "num_hidden_layers": int(get("block_count")),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": int(get("attention.head_count_kv", heads)),
        "head_dim": int(get("attention.key_length", hidden // heads)),
        "intermediate_size": int(get("feed_forward_length")),
        "max_position_embeddings": int(get("context_length")),
        "rope_theta": float(get("rope.freq_base", 10000.0)),
        "rope_scaling": _rope_scaling(get),
        "rms_norm_eps": float(get("attention.layer_norm_rms_epsilon")),
    }


def _rope_scaling(get: Callable[..., Any]) -> dict[str, Any]:
    kind = get("rope.scaling.type", "none")
    if kind in ("none", ""):
        return {}
    scaling: dict[str, Any] = {"rope_type": kind}
    if kind in ("linear", "yarn"):
        scaling["factor"] = float(get("rope.scaling.factor"))
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = int(get("rope.scaling.original_context_length"))
    return scaling
