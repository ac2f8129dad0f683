"""GGUF files of a few kilobytes, with random weights and a tokenizer of bytes."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
from tokenizers.pre_tokenizers import ByteLevel

HIDDEN, FFN, HEADS, KV_HEADS, LAYERS = 64, 96, 4, 2, 2
TOKENS = sorted(ByteLevel.alphabet())


def tensors() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)

    def matrix(rows: int, width: int) -> np.ndarray:
        return (random.standard_normal((rows, width)) * 0.1).astype(np.float32)

    kv = HIDDEN // HEADS * KV_HEADS
    named = {"token_embd.weight": matrix(len(TOKENS), HIDDEN), "output_norm.weight": np.ones(HIDDEN, np.float32)}
    for layer in range(LAYERS):
        named |= {
            f"blk.{layer}.attn_norm.weight": np.ones(HIDDEN, np.float32),
            f"blk.{layer}.attn_q.weight": matrix(HIDDEN, HIDDEN),
            f"blk.{layer}.attn_k.weight": matrix(kv, HIDDEN),
            f"blk.{layer}.attn_v.weight": matrix(kv, HIDDEN),
            f"blk.{layer}.attn_output.weight": matrix(HIDDEN, HIDDEN),
            f"blk.{layer}.ffn_norm.weight": np.ones(HIDDEN, np.float32),
            f"blk.{layer}.ffn_gate.weight": matrix(FFN, HIDDEN),
            f"blk.{layer}.ffn_up.weight": matrix(FFN, HIDDEN),
            f"blk.{layer}.ffn_down.weight": matrix(HIDDEN, FFN),
        }
    return named


def write(
    path: Path, named: dict[str, np.ndarray] | None = None, architecture: str = "llama", **scaling: str | float
) -> Path:
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    for key, value in scaling.items():
        add = writer.add_string if isinstance(value, str) else writer.add_float32
        add(f"{architecture}.rope.scaling.{key}", value)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(TOKENS)
    writer.add_token_types([1] * len(TOKENS))
    writer.add_token_merges([])
    writer.add_eos_token_id(0)
    for name, values in (tensors() if named is None else named).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
