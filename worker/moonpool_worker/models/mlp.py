"""The gated feed-forward layer: down(act(gate(x)) * up(x)), gate and up being one matrix (Shazeer, GLU, 2020)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from moonpool_worker.kernels.interface import Kernels, Linear
from moonpool_worker.weights.tensor_reader import TensorReader

#: [T, 2 * ffn] (gate, up) → [T, ffn]: ``kernels.silu_mul`` or another.
Activation = Callable[[torch.Tensor], torch.Tensor]


def mlp_shapes(prefix: str, hidden: int, ffn: int) -> dict[str, tuple[int, ...]]:
    """Tensors of one layer under Hugging Face's names. ``prefix`` ends with a dot."""
    return {
        f"{prefix}gate_proj.weight": (ffn, hidden),
        f"{prefix}up_proj.weight": (ffn, hidden),
        f"{prefix}down_proj.weight": (hidden, ffn),
    }


class GatedMLP:
    """[T, hidden] → [T, hidden]. ``activation`` [T, 2 * ffn] → [T, ffn]."""

    def __init__(self, gate_up: Linear, down: Linear, activation: Activation) -> None:
        self.gate_up, self.down, self.activation = gate_up, down, activation

    @classmethod
    def read(
        cls, reader: TensorReader, kernels: Kernels, prefix: str, activation: Activation | None = None
    ) -> GatedMLP:
        """From the tensors of :func:`mlp_shapes`; SwiGLU unless ``activation`` says otherwise."""
        gate_up = kernels.linear(reader.matrix(f"{prefix}gate_proj.weight", f"{prefix}up_proj.weight"))
        down = kernels.linear(reader.matrix(f"{prefix}down_proj.weight"))
        return cls(gate_up, down, activation or kernels.silu_mul)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.activation(self.gate_up(x)))
