"""GGUF files: metadata, tokenizer, and tensors dequantised a few rows at a time.

Block dequantisation is the ``gguf`` package's.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moonpool_worker.models.config import SUPPORTED_ARCHITECTURES, ModelConfig
from moonpool_worker.tokenizer.from_gguf import tokenizer_from_gguf
from moonpool_worker.tokenizer.tokenizer import Tokenizer
from moonpool_worker.weights.digest import PinnedFile, digest_of
from moonpool_worker.weights.errors import ModelLoadError
from moonpool_worker.weights.gguf_reader import GGUFError, GGUFReader

_LAYER = {
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
_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
#: Elements that are dequantised at once: 8 MB in float32.
_SLICE = 2 << 20


class GGUFCheckpoint:
    """Raises ModelLoadError for a file that is no GGUF, is cut short, or holds an unsupported architecture."""

    def __init__(self, path: Path) -> None:
        self._file = PinnedFile(path)
        self._mapped = self._file.map()
        try:
            self._reader = GGUFReader(self._mapped)
        except GGUFError as fault:
            raise ModelLoadError(f"{path} is not a complete GGUF file: {fault}") from fault
        self._tensors = {_name(name): tensor for name, tensor in self._reader.tensors.items()}
        self.config = _config(self._field, path, "lm_head.weight" not in self._tensors)

    def _field(self, key: str, default: Any = None) -> Any:
        return self._reader.fields.get(key, default)

    def tokenizer(self) -> Tokenizer:
        return tokenizer_from_gguf(self._field)

    def names(self) -> list[str]:
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def size(self, name: str) -> int:
        return self._tensors[name].nbytes

    def rows(self, name: str) -> Iterator[tuple[int, torch.Tensor]]:
        tensor = self._tensors[name]
        heads = _heads_to_unpermute(name, self.config)
        count, width = tensor.shape[0], tensor.shape[-1]
        step = max(1, _SLICE // width) if not heads and len(tensor.shape) > 1 else count
        for first in range(0, count, step):
            try:
                values = self._reader.dequantised(tensor, first, step)
            except NotImplementedError as fault:
                raise ModelLoadError(
                    f"{self._file.path} has {name} as {tensor.kind.name}, which is not supported"
                ) from fault
            yield first, torch.from_numpy(_unpermute(values, heads) if heads else values)

    def digest(self) -> str:
        digest = digest_of([(self._file.path.name, self._file)], single=True)
        self._file.check_unchanged()
        return digest

    def close(self) -> None:
        self._tensors = {}
        self._mapped.close()
        self._file.close()


def _name(name: str) -> str:
    if name in _TOP:
        return _TOP[name]
    prefix, number, rest = [*name.split(".", 2), "", ""][:3]
    if prefix == "blk" and rest in _LAYER:
        return f"model.layers.{number}.{_LAYER[rest]}"
    return name


def _heads_to_unpermute(name: str, config: ModelConfig) -> int:
    """llama-architecture files store q and k for interleaved RoPE; the engine rotates halves."""
    if name.endswith("self_attn.q_proj.weight"):
        return config.heads
    if name.endswith("self_attn.k_proj.weight"):
        return config.kv_heads
    return 0


def _unpermute(weight: np.ndarray, heads: int) -> np.ndarray:
    rows, width = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, width).swapaxes(1, 2).reshape(rows, width)


def _config(field: Any, path: Path, tied: bool) -> ModelConfig:
    architecture = field("general.architecture", "")
    if architecture not in SUPPORTED_ARCHITECTURES:
        supported = ", ".join(sorted(SUPPORTED_ARCHITECTURES))
        raise ModelLoadError(
            f"{path} is of architecture {architecture!r}, which is not supported; supported: {supported}"
        )

    def get(key: str, default: Any = None) -> Any:
        value = field(f"{architecture}.{key}", default)
        if value is None:
            raise ModelLoadError(f"{path} lacks {architecture}.{key}")
        return value

    scaling = field(f"{architecture}.rope.scaling.type", "none")
    if scaling not in ("none", ""):
        raise ModelLoadError(f"{path} wants RoPE scaling {scaling!r}, which is not supported")
    tokens = field("tokenizer.ggml.tokens")
    if not tokens:
        raise ModelLoadError(f"{path} holds no tokenizer")
    try:
        heads, hidden = int(get("attention.head_count")), int(get("embedding_length"))
        return ModelConfig(
            architecture=architecture,
            layers=int(get("block_count")),
            hidden=hidden,
            heads=heads,
            kv_heads=int(get("attention.head_count_kv", heads)),
            head_dim=int(get("attention.key_length", hidden // heads)),
            ffn=int(get("feed_forward_length")),
            vocab=len(tokens),
            context_length=int(get("context_length")),
            rope_theta=float(get("rope.freq_base", 10000.0)),
            norm_eps=float(get("attention.layer_norm_rms_epsilon")),
            tied=tied,
        )
    except (TypeError, ValueError, ZeroDivisionError) as fault:
        raise ModelLoadError(f"{path} describes a shape that is not supported: {fault}") from fault
