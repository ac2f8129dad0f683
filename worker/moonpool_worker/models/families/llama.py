"""The llama family: pre-norm decoder with RoPE, grouped-query attention and SwiGLU (Touvron et al., 2023).

q, k and v are one matrix, gate and up are one matrix: fewer, larger products.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from moonpool_api.geometry import GroupGeometry, full_attention

from moonpool_worker.engine.batch import StepBatch
from moonpool_worker.kernels.decoder import DecoderLayer, DecoderParts, WholeDecoder
from moonpool_worker.kernels.interface import Kernels, Linear
from moonpool_worker.models.config import AttentionConfig, ModelConfig
from moonpool_worker.models.family import Cache, Family, GGUFForm
from moonpool_worker.models.gguf_names import GGUF_LAYER, GGUF_TOP, gguf_config
from moonpool_worker.models.read_config import decoder_fields
from moonpool_worker.models.rope import rope_table
from moonpool_worker.models.rows import last_rows, positions, token_ids
from moonpool_worker.weights.tensor_reader import TensorReader

_EMBEDDING, _NORM, _HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


def tensor_shapes(config: AttentionConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that the family needs, under Hugging Face's names."""
    c = config
    q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
    shapes: dict[str, tuple[int, ...]] = {_EMBEDDING: (c.vocab, c.hidden), _NORM: (c.hidden,)}
    if not c.tied:
        shapes[_HEAD] = (c.vocab, c.hidden)
    for number in range(c.layers):
        prefix = f"model.layers.{number}."
        shapes |= {
            f"{prefix}input_layernorm.weight": (c.hidden,),
            f"{prefix}self_attn.q_proj.weight": (q, c.hidden),
            f"{prefix}self_attn.k_proj.weight": (kv, c.hidden),
            f"{prefix}self_attn.v_proj.weight": (kv, c.hidden),
            f"{prefix}self_attn.o_proj.weight": (c.hidden, q),
            f"{prefix}post_attention_layernorm.weight": (c.hidden,),
            f"{prefix}mlp.gate_proj.weight": (c.ffn, c.hidden),
            f"{prefix}mlp.up_proj.weight": (c.ffn, c.hidden),
            f"{prefix}mlp.down_proj.weight": (c.hidden, c.ffn),
        }
    return shapes


@dataclass(slots=True)
class _Layer:
    input_norm: torch.Tensor  # [hidden]
    qkv: Linear  # hidden → (H + 2 K) * D
    out: Linear  # H * D → hidden
    post_norm: torch.Tensor  # [hidden]
    gate_up: Linear  # hidden → 2 * ffn
    down: Linear  # ffn → hidden

    @classmethod
    def read(cls, reader: TensorReader, kernels: Kernels, number: int) -> _Layer:
        """Each matrix is packed before the next is read, so that only one stands in memory twice."""
        prefix = f"model.layers.{number}."

        def linear(*names: str) -> Linear:
            return kernels.linear(reader.matrix(*(f"{prefix}{name}.weight" for name in names)))

        return cls(
            input_norm=reader.read(f"{prefix}input_layernorm.weight"),
            qkv=linear("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            out=linear("self_attn.o_proj"),
            post_norm=reader.read(f"{prefix}post_attention_layernorm.weight"),
            gate_up=linear("mlp.gate_proj", "mlp.up_proj"),
            down=linear("mlp.down_proj"),
        )

    def described(self) -> DecoderLayer:
        """For a backend that computes all layers in one call."""
        return DecoderLayer(
            input_norm=self.input_norm,
            qkv=self.qkv,
            out=self.out,
            post_norm=self.post_norm,
            gate_up=self.gate_up,
            down=self.down,
            group=0,
            window=None,
        )


class LlamaModel:
    """Weights and forward pass. ``weight_bytes``: what the weights take in memory, a packed head included.

    A tied head is held twice, as rows to look up and packed to multiply: it is read once a token, and the packed form
    makes that up to four times faster.
    """

    def __init__(self, config: AttentionConfig, reader: TensorReader, kernels: Kernels) -> None:
        self.config, self.dtype, self.kernels = config, reader.dtype, kernels
        self.embedding = reader.read(_EMBEDDING)
        self.norm = reader.read(_NORM)
        self.layers = [_Layer.read(reader, kernels, number) for number in range(config.layers)]
        tied = (reader.quantised(_EMBEDDING) or self.embedding) if config.tied else None
        self.head = kernels.linear(reader.matrix(_HEAD) if tied is None else tied)
        self._whole = self._as_one_call()
        cos, sin = rope_table(
            config.head_dim, config.context_length, config.rope_theta, self.dtype, config.rope_scaling
        )
        self._cos, self._sin = cos.to(self.embedding.device), sin.to(self.embedding.device)

    @property
    def weight_bytes(self) -> int:
        elements = sum(math.prod(shape) for shape in tensor_shapes(self.config).values())
        copied = self.embedding.numel() if self.config.tied else 0
        return (elements + copied) * self.dtype.itemsize

    def forward(self, batch: StepBatch, cache: Cache) -> torch.Tensor:
        """float32 logits [chunks that want them, vocab]."""
        if self._whole is not None:
            return self._whole.forward(batch, cache)
        c, kernels, device = self.config, self.kernels, self.embedding.device
        x = F.embedding(token_ids(batch, device), self.embedding)
        where = positions(batch, device)
        cos, sin = self._cos[where].unsqueeze(1), self._sin[where].unsqueeze(1)
        plan = kernels.plan(batch.chunks, 0, cache.geometry.groups[0], device)
        count, q_heads, kv_heads = x.shape[0], c.heads, c.kv_heads
        for number, layer in enumerate(self.layers):
            keys, values = cache.view(0, number, "k"), cache.view(0, number, "v")
            h = kernels.rms_norm(x, layer.input_norm, c.norm_eps)
            qkv = layer.qkv(h).view(count, q_heads + 2 * kv_heads, c.head_dim)
            rotated = kernels.rope(qkv[:, : q_heads + kv_heads], cos, sin)
            kernels.write_rows(plan, keys, rotated[:, q_heads:])
            kernels.write_rows(plan, values, qkv[:, q_heads + kv_heads :])
            attended = kernels.attention(plan, rotated[:, :q_heads], keys, values)
            x += layer.out(attended)
            h = kernels.rms_norm(x, layer.post_norm, c.norm_eps)
            x += layer.down(kernels.silu_mul(layer.gate_up(h)))
        # Only the rows that are asked for go through the head: the vocabulary is the largest product.
        last = last_rows(batch, x)
        if not last.shape[0]:
            return torch.empty(0, c.vocab)
        return self.head(kernels.rms_norm(last, self.norm, c.norm_eps)).float()

    def _as_one_call(self) -> WholeDecoder | None:
        """The same forward pass, where the backend has it as one call."""
        c = self.config
        parts = DecoderParts(
            layers=[layer.described() for layer in self.layers],
            embedding=self.embedding,
            norm=self.norm,
            head=self.head,
            heads=c.heads,
            kv_heads=c.kv_heads,
            head_dim=c.head_dim,
            ffn=c.ffn,
            eps=c.norm_eps,
            scale=c.head_dim**-0.5,
            angles=lambda dtype: [rope_table(c.head_dim, c.context_length, c.rope_theta, dtype, c.rope_scaling)],
        )
        return self.kernels.decoder(parts)


def groups(config: AttentionConfig, dtype: str, granularity: int) -> tuple[GroupGeometry, ...]:
    """One group: all layers keep all of the text."""
    return full_attention(
        layers=config.layers,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        dtype=dtype,
        prefix_granularity=granularity,
    ).groups


def read_config(raw: Mapping[str, Any]) -> AttentionConfig:
    return AttentionConfig(architecture="llama", **decoder_fields(raw))


def _undo(name: str, config: ModelConfig) -> Callable[[np.ndarray], np.ndarray] | None:
    """llama-architecture files store q and k for interleaved RoPE; the engine rotates halves."""
    assert isinstance(config, AttentionConfig)
    heads = {"q_proj": config.heads, "k_proj": config.kv_heads}.get(name.split(".")[-2], 0)
    if not heads:
        return None

    def unpermute(weight: np.ndarray) -> np.ndarray:
        rows, width = weight.shape
        return weight.reshape(heads, rows // heads // 2, 2, width).swapaxes(1, 2).reshape(rows, width)

    return unpermute


FAMILY = Family(
    model_types=("llama",),
    read_config=read_config,
    tensor_shapes=tensor_shapes,
    groups=groups,
    build=LlamaModel,
    gguf=(GGUFForm("llama", gguf_config, GGUF_LAYER, GGUF_TOP, _undo),),
)
