"""An ordinary decoder, described as a whole, for backends that compute all of a step in one call.

Pre-norm, RoPE over all of a head, grouped-query attention, dense gated feed-forward layers:
x += out(attention(norm(x))); x += down(act(gate) * up).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from moonpool_worker.engine.batch import StepBatch
from moonpool_worker.kernels.linear import Linear


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderLayer:
    """``qkv`` stacks q, k and v, ``gate_up`` gate and up. ``q_norm``, ``k_norm`` [D]: RMS norms of single heads;
    ``behind_attention``, ``behind_feed_forward`` [hidden]: of what is added; ``sinks`` [H].

    ``group``: its cache group, with planes k and v; ``window``: how far back it looks.
    """

    input_norm: torch.Tensor
    qkv: Linear
    out: Linear
    post_norm: torch.Tensor
    gate_up: Linear
    down: Linear
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    behind_attention: torch.Tensor | None = None
    behind_feed_forward: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    group: int
    window: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderParts:
    """Everything that a forward pass needs. ``embedding`` [vocab, hidden]; ``scale``: of the softmax.

    ``angles(dtype)``: for each cache group, cos and sin of all positions, [context, D / 2] each.
    """

    layers: list[DecoderLayer]
    embedding: torch.Tensor
    embedding_scale: float = 1.0
    norm: torch.Tensor
    head: Linear
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    eps: float
    scale: float
    activation: Literal["silu", "gelu_tanh"] = "silu"
    angles: Callable[[torch.dtype], Sequence[tuple[torch.Tensor, torch.Tensor]]]


class PagedCache(Protocol):
    """The arena, as the decoder sees it."""

    def view(self, group: int, layer: int, plane: str) -> torch.Tensor: ...


class WholeDecoder(Protocol):
    def forward(self, batch: StepBatch, cache: PagedCache) -> torch.Tensor:
        """float32 logits [chunks that want them, vocab]; the step's keys and values are in ``cache`` afterwards."""
        ...
