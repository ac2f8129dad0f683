"""A pre-norm decoder, as most families have it: what they differ in is declared by :class:`DecoderConfig`.

A family whose feed-forward layers are of another kind gives functions of its own for their tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from moonpool_api.geometry import GroupGeometry

from moonpool_worker.engine.batch import StepBatch
from moonpool_worker.kernels.decoder import DecoderLayer, DecoderParts, WholeDecoder
from moonpool_worker.kernels.interface import Kernels
from moonpool_worker.kernels.linear import Weight
from moonpool_worker.models.attention_block import AttentionBlock, AttentionForm, read_norm
from moonpool_worker.models.config import AttentionConfig
from moonpool_worker.models.family import Cache
from moonpool_worker.models.mlp import Activation, GatedMLP, mlp_shapes
from moonpool_worker.models.rope import rope_table
from moonpool_worker.models.rows import last_rows, positions, token_ids
from moonpool_worker.models.step import Angles, FeedForward, Step
from moonpool_worker.models.windows import Window, attention_groups, group_of_layer, reaches
from moonpool_worker.weights.tensor_reader import TensorReader

EMBEDDING, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig(AttentionConfig):
    """``windows``: each layer's. ``window_theta`` in ``rope_scaling``: layers with a window have plain RoPE of that
    theta. ``sandwich_norms``: a norm behind attention and feed-forward too. The rest as in :class:`AttentionForm`."""

    windows: tuple[Window, ...]
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    sinks: bool = False
    attention_scale: float | None = None
    activation: Literal["silu", "gelu_tanh"] = "silu"
    sandwich_norms: bool = False
    norm_offset: float = 0.0
    embedding_scale: float = 1.0

    @property
    def attention(self) -> AttentionForm:
        return AttentionForm(
            hidden=self.hidden,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            qkv_bias=self.qkv_bias,
            out_bias=self.out_bias,
            qk_norm=self.qk_norm,
            sinks=self.sinks,
            scale=self.attention_scale,
            norm_eps=self.norm_eps,
            norm_offset=self.norm_offset,
        )


#: Tensors of layer ``number``'s feed-forward part, and how it is read: ``(config, number)`` and
#: ``(config, reader, kernels, number)``.
FeedForwardShapes = Callable[[Any, int], dict[str, tuple[int, ...]]]
ReadFeedForward = Callable[[Any, TensorReader, Kernels, int], FeedForward]


def dense_shapes(config: DecoderConfig, number: int) -> dict[str, tuple[int, ...]]:
    return mlp_shapes(f"model.layers.{number}.mlp.", config.hidden, config.ffn)


def read_dense(config: DecoderConfig, reader: TensorReader, kernels: Kernels, number: int) -> FeedForward:
    activation: Activation = kernels.gelu_mul if config.activation == "gelu_tanh" else kernels.silu_mul
    return GatedMLP.read(reader, kernels, f"model.layers.{number}.mlp.", activation)


def decoder_shapes(config: DecoderConfig, feed_forward: FeedForwardShapes = dense_shapes) -> dict[str, tuple[int, ...]]:
    """Every tensor that the family needs, under Hugging Face's names."""
    c = config
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (c.vocab, c.hidden), NORM: (c.hidden,)}
    if not c.tied:
        shapes[HEAD] = (c.vocab, c.hidden)
    for number in range(c.layers):
        prefix = f"model.layers.{number}."
        shapes |= {f"{prefix}{name}.weight": (c.hidden,) for name in _norms(c)}
        shapes |= c.attention.shapes(f"{prefix}self_attn.")
        shapes |= feed_forward(c, number)
    return shapes


def decoder_groups(config: DecoderConfig, dtype: str, granularity: int) -> tuple[GroupGeometry, ...]:
    """A group of the layers that keep all of the text, and one for each window."""
    c = config
    return attention_groups(
        c.windows, kv_heads=c.kv_heads, head_dim=c.head_dim, dtype=dtype, prefix_granularity=granularity
    )


def _norms(config: DecoderConfig) -> tuple[str, ...]:
    """In the order in which a layer uses them."""
    if config.sandwich_norms:
        return (
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
        )
    return ("input_layernorm", "post_attention_layernorm")


class _Layer:
    def __init__(
        self,
        config: DecoderConfig,
        reader: TensorReader,
        kernels: Kernels,
        number: int,
        group: int,
        read_feed_forward: ReadFeedForward,
    ) -> None:
        prefix = f"model.layers.{number}."
        norms: Iterator[torch.Tensor] = (
            read_norm(reader, f"{prefix}{name}.weight", config.norm_offset) for name in _norms(config)
        )
        self._eps = config.norm_eps
        self._before_attention = next(norms)
        self._behind_attention = next(norms) if config.sandwich_norms else None
        self._before_feed_forward = next(norms)
        self._behind_feed_forward = next(norms) if config.sandwich_norms else None
        self._attention = AttentionBlock(config.attention, reader, kernels, f"{prefix}self_attn.", number, group)
        self._feed_forward = read_feed_forward(config, reader, kernels, number)

    def described(self, window: Window, group: int) -> DecoderLayer | None:
        """For a backend that computes all layers in one call; None when this one has no dense feed-forward part."""
        attention, mlp = self._attention, self._feed_forward
        if not isinstance(mlp, GatedMLP):
            return None
        return DecoderLayer(
            input_norm=self._before_attention,
            qkv=attention.qkv,
            q_norm=attention.q_norm,
            k_norm=attention.k_norm,
            sinks=attention.sinks,
            out=attention.out,
            behind_attention=self._behind_attention,
            post_norm=self._before_feed_forward,
            gate_up=mlp.gate_up,
            down=mlp.down,
            behind_feed_forward=self._behind_feed_forward,
            group=group,
            window=window,
        )

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """``x`` [T, hidden], which may be overwritten by the result."""
        kernels, eps = step.kernels, self._eps
        attended = self._attention(kernels.rms_norm(x, self._before_attention, eps), step)
        if self._behind_attention is not None:
            attended = kernels.rms_norm(attended, self._behind_attention, eps)
        h, x = kernels.add_rms_norm(attended, x, self._before_feed_forward, eps)
        h = self._feed_forward(h)
        if self._behind_feed_forward is not None:
            h = kernels.rms_norm(h, self._behind_feed_forward, eps)
        return x.add_(h)


class Decoder:
    """Weights and forward pass. ``weight_bytes``: what the weights take in memory, a packed head included.

    A tied head is held twice, as rows to look up and packed to multiply: it is read once a token, and the packed form
    makes that up to four times faster.
    """

    def __init__(
        self,
        config: DecoderConfig,
        reader: TensorReader,
        kernels: Kernels,
        *,
        shapes: FeedForwardShapes = dense_shapes,
        feed_forward: ReadFeedForward = read_dense,
    ) -> None:
        self.config, self.dtype, self.kernels = config, reader.dtype, kernels
        self._elements = sum(math.prod(shape) for shape in decoder_shapes(config, shapes).values())
        self._embedding = reader.read(EMBEDDING)
        self._norm = read_norm(reader, NORM, config.norm_offset)
        groups = group_of_layer(config.windows)
        self._layers = [
            _Layer(config, reader, kernels, number, groups[number], feed_forward) for number in range(config.layers)
        ]
        self._head = kernels.linear(_head(config, reader, self._embedding))
        self._whole = self._as_one_call(groups)
        tables = [] if self._whole else _tables(config, reader.dtype)
        self._tables = [(cos.to(reader.device), sin.to(reader.device)) for cos, sin in tables]

    @property
    def weight_bytes(self) -> int:
        copied = self._embedding.numel() if self.config.tied else 0
        return (self._elements + copied) * self.dtype.itemsize

    def forward(self, batch: StepBatch, cache: Cache) -> torch.Tensor:
        """float32 logits [chunks that want them, vocab]."""
        if self._whole is not None:
            return self._whole.forward(batch, cache)
        c, kernels, device = self.config, self.kernels, self._embedding.device
        x = F.embedding(token_ids(batch, device), self._embedding)
        if c.embedding_scale != 1.0:
            # The scale is rounded to the model's dtype, as it was in training.
            x *= torch.tensor(c.embedding_scale, dtype=self.dtype, device=device)
        where = positions(batch, device)
        angles: list[Angles] = [(cos[where].unsqueeze(1), sin[where].unsqueeze(1)) for cos, sin in self._tables]
        step = Step.begin(batch, cache, kernels, angles, device)
        for layer in self._layers:
            x = layer(x, step)
        # Only the rows that are asked for go through the head: the vocabulary is the largest product.
        last = last_rows(batch, x)
        if not last.shape[0]:
            return torch.empty(0, c.vocab)
        return self._head(kernels.rms_norm(last, self._norm, c.norm_eps)).float()

    def _as_one_call(self, groups: Sequence[int]) -> WholeDecoder | None:
        """The same forward pass, where the backend has it as one call."""
        c = self.config
        described = (layer.described(c.windows[i], groups[i]) for i, layer in enumerate(self._layers))
        layers = [layer for layer in described if layer is not None]
        if len(layers) < c.layers:
            return None
        return self.kernels.decoder(
            DecoderParts(
                layers=layers,
                embedding=self._embedding,
                # Rounded to the model's dtype, as it was in training.
                embedding_scale=float(torch.tensor(c.embedding_scale, dtype=self.dtype)),
                norm=self._norm,
                head=self._head,
                heads=c.heads,
                kv_heads=c.kv_heads,
                head_dim=c.head_dim,
                ffn=c.ffn,
                eps=c.norm_eps,
                scale=c.head_dim**-0.5 if c.attention_scale is None else c.attention_scale,
                activation=c.activation,
                angles=lambda dtype: _tables(c, dtype),
            )
        )


def _head(config: DecoderConfig, reader: TensorReader, embedding: torch.Tensor) -> Weight:
    if not config.tied:
        return reader.matrix(HEAD)
    return reader.quantised(EMBEDDING) or embedding


def _tables(config: DecoderConfig, dtype: torch.dtype) -> list[Angles]:
    """cos and sin [context, D / 2] for each cache group."""
    c = config
    plain = rope_table(c.head_dim, c.context_length, c.rope_theta, dtype, c.rope_scaling)
    if "window_theta" not in c.rope_scaling:
        return [plain for _ in reaches(c.windows)]
    near = rope_table(c.head_dim, c.context_length, float(c.rope_scaling["window_theta"]), dtype)
    return [plain if window is None else near for window in reaches(c.windows)]
