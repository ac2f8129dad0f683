"""The llama family: pre-norm decoder with RoPE, grouped-query attention and SwiGLU (Touvron et al., 2023).

q, k and v are one matrix, gate and up are one matrix: fewer, larger products.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from moonpool_worker.engine.batch import StepBatch
from moonpool_worker.kernels.interface import Kernels, Linear
from moonpool_worker.models.config import ModelConfig
from moonpool_worker.weights.tensor_reader import TensorReader

_EMBEDDING, _NORM, _HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
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

        def read(*names: str) -> torch.Tensor:
            return reader.read(*(f"{prefix}{name}.weight" for name in names))

        return cls(
            input_norm=read("input_layernorm"),
            qkv=kernels.linear(read("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
            out=kernels.linear(read("self_attn.o_proj")),
            post_norm=read("post_attention_layernorm"),
            gate_up=kernels.linear(read("mlp.gate_proj", "mlp.up_proj")),
            down=kernels.linear(read("mlp.down_proj")),
        )


class LlamaModel:
    """Weights and forward pass. ``weight_bytes``: what the weights take in memory, a packed head included.

    A tied head is held twice, as rows to look up and packed to multiply: it is read once a token, and the packed form
    makes that up to four times faster.
    """

    def __init__(self, config: ModelConfig, reader: TensorReader, kernels: Kernels) -> None:
        self.config, self.dtype, self.kernels = config, reader.dtype, kernels
        self.embedding = reader.read(_EMBEDDING)
        self.norm = reader.read(_NORM)
        self.layers = [_Layer.read(reader, kernels, number) for number in range(config.layers)]
        self.head = kernels.linear(self.embedding if config.tied else reader.read(_HEAD))
        self._cos, self._sin = _rope_table(config, self.dtype)

    @property
    def weight_bytes(self) -> int:
        elements = sum(math.prod(shape) for shape in tensor_shapes(self.config).values())
        copied = self.embedding.numel() if self.config.tied else 0
        return (elements + copied) * self.dtype.itemsize

    def forward(self, batch: StepBatch, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """``keys``, ``values``: the arena, [layers, blocks, P, K, D]. Returns float32 [rows with logits, vocab]."""
        c, kernels = self.config, self.kernels
        tokens = [token for chunk in batch.chunks for token in chunk.token_ids]
        positions = [position for chunk in batch.chunks for position in range(chunk.start, chunk.end)]
        x = F.embedding(torch.tensor(tokens), self.embedding)
        where = torch.tensor(positions)
        cos, sin = self._cos[where].unsqueeze(1), self._sin[where].unsqueeze(1)
        plan = kernels.plan(batch.chunks, keys.shape[2], keys.dtype, keys.device)
        count, q_heads, kv_heads = len(tokens), c.heads, c.kv_heads
        for number, layer in enumerate(self.layers):
            h = kernels.rms_norm(x, layer.input_norm, c.norm_eps)
            qkv = layer.qkv(h).view(count, q_heads + 2 * kv_heads, c.head_dim)
            rotated = kernels.rope(qkv[:, : q_heads + kv_heads], cos, sin)
            kernels.write_kv(plan, keys[number], rotated[:, q_heads:])
            kernels.write_kv(plan, values[number], qkv[:, q_heads + kv_heads :])
            attended = kernels.attention(plan, rotated[:, :q_heads], keys[number], values[number])
            x += layer.out(attended)
            h = kernels.rms_norm(x, layer.post_norm, c.norm_eps)
            x += layer.down(kernels.silu_mul(layer.gate_up(h)))
        return self._logits(batch, x)

    def _logits(self, batch: StepBatch, x: torch.Tensor) -> torch.Tensor:
        """Only the rows that are asked for go through the head: the vocabulary is the largest product."""
        rows, end = [], 0
        for chunk in batch.chunks:
            end += len(chunk.token_ids)
            if chunk.wants_logits:
                rows.append(end - 1)
        if not rows:
            return torch.empty(0, self.config.vocab)
        last = x if len(rows) == x.shape[0] else x[torch.tensor(rows)]
        return self.head(self.kernels.rms_norm(last, self.norm, self.config.norm_eps)).float()


def _rope_table(config: ModelConfig, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of every position, [context, D / 2] (Su et al., RoFormer, 2021)."""
    dim = config.head_dim
    frequencies = config.rope_theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angles = torch.outer(torch.arange(config.context_length, dtype=torch.float64), frequencies)
    return angles.cos().to(dtype), angles.sin().to(dtype)
