"""A pre-norm decoder whose layers are of two kinds: attention over all of the text, and a recurrent state.

The layers with attention are cache group 0 where there are any, those with a state the group behind it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from moonpool_worker.engine.batch import StepBatch
from moonpool_worker.kernels.interface import Kernels
from moonpool_worker.models.attention_block import read_norm
from moonpool_worker.models.config import ModelConfig
from moonpool_worker.models.family import Cache
from moonpool_worker.models.rope import rope_table
from moonpool_worker.models.rows import last_rows, positions, token_ids
from moonpool_worker.models.step import FeedForward, Step
from moonpool_worker.weights.tensor_reader import TensorReader

EMBEDDING, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


class Mixer(Protocol):
    """What mixes tokens: attention or a recurrence."""

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """[T, hidden], normed → [T, hidden]."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridConfig(ModelConfig):
    """``attends``: for each layer whether it has attention. ``rotary``: how many numbers of a head RoPE turns, 0 where
    there is none. ``norm_offset`` is added to the weights of norms."""

    attends: tuple[bool, ...]
    rotary: int = 0
    norm_offset: float = 0.0

    def layers_of(self, attends: bool) -> tuple[int, ...]:
        return tuple(number for number, found in enumerate(self.attends) if found == attends)

    def group_of(self, number: int) -> int:
        """The cache group of a layer."""
        return 0 if self.attends[number] else int(any(self.attends))


def read_layer_types(raw: Mapping[str, Any]) -> tuple[bool, ...]:
    """``attends`` from ``layer_types``. ValueError for other kinds of layers."""
    for kind in raw["layer_types"]:
        if kind not in ("full_attention", "linear_attention"):
            raise ValueError(f"layers of type {kind!r}")
    return tuple(kind == "full_attention" for kind in raw["layer_types"])


def hybrid_shapes(
    config: HybridConfig, layer: Callable[[int, str], dict[str, tuple[int, ...]]]
) -> dict[str, tuple[int, ...]]:
    """Every tensor, under Hugging Face's names; ``layer(number, prefix)`` gives those of mixer and feed-forward."""
    c = config
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (c.vocab, c.hidden), NORM: (c.hidden,)}
    if not c.tied:
        shapes[HEAD] = (c.vocab, c.hidden)
    for number in range(c.layers):
        prefix = f"model.layers.{number}."
        shapes |= {f"{prefix}{name}.weight": (c.hidden,) for name in ("input_layernorm", "post_attention_layernorm")}
        shapes |= layer(number, prefix)
    return shapes


class _Layer:
    def __init__(
        self, config: HybridConfig, reader: TensorReader, number: int, mixer: Mixer, feed_forward: FeedForward
    ) -> None:
        prefix = f"model.layers.{number}."
        self._eps = config.norm_eps
        self._input_norm = read_norm(reader, f"{prefix}input_layernorm.weight", config.norm_offset)
        self._mixer = mixer
        self._post_norm = read_norm(reader, f"{prefix}post_attention_layernorm.weight", config.norm_offset)
        self._feed_forward = feed_forward

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """``x`` [T, hidden], which may be overwritten by the result."""
        kernels = step.kernels
        mixed = self._mixer(kernels.rms_norm(x, self._input_norm, self._eps), step)
        h, x = kernels.add_rms_norm(mixed, x, self._post_norm, self._eps)
        return x.add_(self._feed_forward(h))


class Hybrid:
    """Weights and forward pass. ``weight_bytes``: what the weights take in memory, a packed head included.

    ``mixer(number, prefix, group)`` and ``feed_forward(number, prefix)`` read a layer's parts.
    """

    def __init__(
        self,
        config: HybridConfig,
        reader: TensorReader,
        kernels: Kernels,
        shapes: Mapping[str, tuple[int, ...]],
        mixer: Callable[[int, str, int], Mixer],
        feed_forward: Callable[[int, str], FeedForward],
    ) -> None:
        self.config, self.dtype, self.kernels = config, reader.dtype, kernels
        self._elements = sum(math.prod(shape) for shape in shapes.values())
        self._embedding = reader.read(EMBEDDING)
        self._norm = read_norm(reader, NORM, config.norm_offset)
        self._layers = []
        for number in range(config.layers):
            prefix = f"model.layers.{number}."
            mixed = mixer(number, prefix, config.group_of(number))
            self._layers.append(_Layer(config, reader, number, mixed, feed_forward(number, prefix)))
        self._head = kernels.linear(self._embedding if config.tied else reader.read(HEAD))
        self._table = None
        if config.rotary:
            cos, sin = rope_table(
                config.rotary, config.context_length, config.rope_theta, self.dtype, config.rope_scaling
            )
            self._table = cos.to(self._embedding.device), sin.to(self._embedding.device)

    @property
    def weight_bytes(self) -> int:
        copied = self._embedding.numel() if self.config.tied else 0
        return (self._elements + copied) * self.dtype.itemsize

    def forward(self, batch: StepBatch, cache: Cache) -> torch.Tensor:
        """float32 logits [chunks that want them, vocab]."""
        kernels, device = self.kernels, self._embedding.device
        x = F.embedding(token_ids(batch, device), self._embedding)
        angles = []
        if self._table is not None:
            where = positions(batch, device)
            cos, sin = self._table
            angles.append((cos[where].unsqueeze(1), sin[where].unsqueeze(1)))
        step = Step.begin(batch, cache, kernels, angles, device)
        for layer in self._layers:
            x = layer(x, step)
        # Only the rows that are asked for go through the head: the vocabulary is the largest product.
        last = last_rows(batch, x)
        if not last.shape[0]:
            return torch.empty(0, self.config.vocab)
        return self._head(kernels.rms_norm(last, self._norm, self.config.norm_eps)).float()
