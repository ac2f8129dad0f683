"""The llama family: pre-norm decoder with RoPE, grouped-query attention and SwiGLU (Touvron et al., 2023).

q, k and v are one matrix, gate and up are one matrix: fewer, larger products.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from moonpool_worker.engine.batch import StepBatch
from moonpool_worker.kernels.interface import Kernels
from moonpool_worker.models.config import ModelConfig
from moonpool_worker.weights.checkpoint import Checkpoint
from moonpool_worker.weights.errors import ModelLoadError

Progress = Callable[[int, int], None]


@dataclass(slots=True)
class _Layer:
    input_norm: torch.Tensor  # [hidden]
    qkv: torch.Tensor  # [(H + 2 K) * D, hidden]
    out: torch.Tensor  # [hidden, H * D]
    post_norm: torch.Tensor  # [hidden]
    gate_up: torch.Tensor  # [2 * ffn, hidden]
    down: torch.Tensor  # [hidden, ffn]


class LlamaModel:
    """Weights and forward pass. ``load`` fills the weights; before it they are uninitialised memory."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, kernels: Kernels) -> None:
        self.config, self.dtype, self.kernels = config, dtype, kernels
        c = config

        def empty(*shape: int) -> torch.Tensor:
            return torch.empty(*shape, dtype=dtype)

        self.embedding = empty(c.vocab, c.hidden)
        self.head = self.embedding if c.tied else empty(c.vocab, c.hidden)
        self.norm = empty(c.hidden)
        self.layers = [
            _Layer(
                input_norm=empty(c.hidden),
                qkv=empty((c.heads + 2 * c.kv_heads) * c.head_dim, c.hidden),
                out=empty(c.hidden, c.heads * c.head_dim),
                post_norm=empty(c.hidden),
                gate_up=empty(2 * c.ffn, c.hidden),
                down=empty(c.hidden, c.ffn),
            )
            for _ in range(c.layers)
        ]
        self._cos, self._sin = _rope_table(c, dtype)

    def destinations(self) -> dict[str, torch.Tensor]:
        """Hugging Face's tensor names and the memory that each one fills."""
        c = self.config
        q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
        where = {"model.embed_tokens.weight": self.embedding, "model.norm.weight": self.norm}
        if not c.tied:
            where["lm_head.weight"] = self.head
        for number, layer in enumerate(self.layers):
            prefix = f"model.layers.{number}."
            where |= {
                f"{prefix}input_layernorm.weight": layer.input_norm,
                f"{prefix}self_attn.q_proj.weight": layer.qkv[:q],
                f"{prefix}self_attn.k_proj.weight": layer.qkv[q : q + kv],
                f"{prefix}self_attn.v_proj.weight": layer.qkv[q + kv :],
                f"{prefix}self_attn.o_proj.weight": layer.out,
                f"{prefix}post_attention_layernorm.weight": layer.post_norm,
                f"{prefix}mlp.gate_proj.weight": layer.gate_up[: c.ffn],
                f"{prefix}mlp.up_proj.weight": layer.gate_up[c.ffn :],
                f"{prefix}mlp.down_proj.weight": layer.down,
            }
        return where

    def load(self, checkpoint: Checkpoint, progress: Progress | None = None) -> None:
        """Copy every tensor in; ``progress(done, total)`` in bytes. Raises ModelLoadError for missing tensors."""
        where = self.destinations()
        names = set(checkpoint.names())
        missing = sorted(where.keys() - names)
        if missing:
            raise ModelLoadError(f"the checkpoint lacks {len(missing)} tensors, {missing[0]} among them")
        total = sum(checkpoint.size(name) for name in where)
        done = 0
        for name, target in where.items():
            if checkpoint.shape(name) != tuple(target.shape):
                found, said = checkpoint.shape(name), tuple(target.shape)
                raise ModelLoadError(f"tensor {name} has shape {found} where the configuration says {said}")
            for first, rows in checkpoint.rows(name):
                target[first : first + rows.shape[0]].copy_(rows)
            done += checkpoint.size(name)
            if progress:
                progress(done, total)

    @property
    def weight_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.destinations().values())

    def forward(self, batch: StepBatch, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """``keys``, ``values``: the arena, [layers, blocks, P, K, D]. Returns float32 [rows with logits, vocab]."""
        c, kernels = self.config, self.kernels
        tokens = [token for chunk in batch.chunks for token in chunk.token_ids]
        positions = [position for chunk in batch.chunks for position in range(chunk.start, chunk.end)]
        x = F.embedding(torch.tensor(tokens), self.embedding)
        where = torch.tensor(positions)
        cos, sin = self._cos[where].unsqueeze(1), self._sin[where].unsqueeze(1)
        plan = kernels.plan(batch.chunks, keys.shape[2], keys.device)
        count, q_heads, kv_heads = len(tokens), c.heads, c.kv_heads
        for number, layer in enumerate(self.layers):
            h = kernels.rms_norm(x, layer.input_norm, c.norm_eps)
            qkv = F.linear(h, layer.qkv).view(count, q_heads + 2 * kv_heads, c.head_dim)
            rotated = kernels.rope(qkv[:, : q_heads + kv_heads], cos, sin)
            kernels.write_kv(plan, keys[number], rotated[:, q_heads:])
            kernels.write_kv(plan, values[number], qkv[:, q_heads + kv_heads :])
            attended = kernels.attention(plan, rotated[:, :q_heads], keys[number], values[number])
            x += F.linear(attended, layer.out)
            h = kernels.rms_norm(x, layer.post_norm, c.norm_eps)
            x += F.linear(kernels.silu_mul(F.linear(h, layer.gate_up)), layer.down)
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
        return F.linear(self.kernels.rms_norm(last, self.norm, self.config.norm_eps), self.head).float()


def _rope_table(config: ModelConfig, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of every position, [context, D / 2] (Su et al., RoFormer, 2021)."""
    dim = config.head_dim
    frequencies = config.rope_theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angles = torch.outer(torch.arange(config.context_length, dtype=torch.float64), frequencies)
    return angles.cos().to(dtype), angles.sin().to(dtype)
