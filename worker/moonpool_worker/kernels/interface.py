"""What a kernel backend offers. Shapes: T tokens of a step, H query heads, K KV heads, D head dimension."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from moonpool_worker.engine.batch import SequenceChunk

#: What a backend prepares once per step from the chunks' block tables, for all layers. Each has its own.
AttentionPlan = Any


class Linear(Protocol):
    """A weight in whatever layout the backend multiplies best."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, in] → [T, out]."""
        ...


class Kernels(Protocol):
    name: str

    def linear(self, weight: torch.Tensor) -> Linear:
        """Take a weight [out, in]; the backend may keep a copy in another layout, so drop the original."""
        ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """[T, hidden] → [T, hidden], computed in float32 as in the RMSNorm paper (Zhang and Sennrich, 2019)."""
        ...

    def rope(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotate halves. ``x`` [T, heads, D]; ``cos``, ``sin`` [T, 1, D / 2]; returns [T, heads, D]."""
        ...

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """[T, 2 * ffn] (gate, up) → silu(gate) * up, [T, ffn]."""
        ...

    def plan(
        self, chunks: Sequence[SequenceChunk], block_size: int, dtype: torch.dtype, device: torch.device
    ) -> AttentionPlan:
        """``block_size``: positions per block, ``dtype``: of keys, values and queries."""
        ...

    def write_kv(self, plan: AttentionPlan, cache: torch.Tensor, rows: torch.Tensor) -> None:
        """Store this step's ``rows`` [T, K, D] into one layer of the arena, ``cache`` [blocks, P, K, D]."""
        ...

    def attention(self, plan: AttentionPlan, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Causal attention of each chunk over its own past. ``q`` [T, H, D]; arena layers as above; → [T, H * D]."""
        ...


class BackendError(ValueError):
    """The backend that was asked for cannot run here; the message says what can."""


def select_backend(name: str) -> Kernels:
    """``auto`` and ``torch`` give the torch backend. Raises BackendError for one that is not here."""
    if name in ("auto", "torch"):
        from moonpool_worker.kernels.torch_backend import TorchKernels

        return TorchKernels()
    if name == "triton":
        raise BackendError("attention backend triton needs a GPU; use auto or torch here")
    raise BackendError(f"there is no attention backend {name!r}; use auto or torch")
