"""Kernels in plain torch: the CPU backend, and what other backends are tested against."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from moonpool_worker.kernels.decoder import DecoderParts, WholeDecoder
from moonpool_worker.kernels.linear import Linear, Weight
from moonpool_worker.kernels.packed_linear import PackedLinear, PlainLinear, can_pack
from moonpool_worker.kernels.threads import usable_cpus
from moonpool_worker.kernels.torch_attention import TorchAttention
from moonpool_worker.kernels.torch_scans import TorchScans
from moonpool_worker.sampling.sampler import list_of_likeliest
from moonpool_worker.weights.quantised import QuantisedMatrix


class TorchKernels(TorchAttention, TorchScans):
    name = "torch"
    device = torch.device("cpu")
    formats: frozenset[str] = frozenset()

    def __init__(self) -> None:
        torch.set_num_threads(usable_cpus())

    def linear(self, weight: Weight, bias: torch.Tensor | None = None) -> Linear:
        if isinstance(weight, QuantisedMatrix):
            weight = weight.dense(torch.bfloat16)
        return PackedLinear(weight, bias) if can_pack(weight) else PlainLinear(weight, bias)

    def decoder(self, parts: DecoderParts) -> WholeDecoder | None:
        return None

    def argmax(self, logits: torch.Tensor) -> list[int]:
        return list_of_likeliest(logits)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        # As F.rms_norm, to the bit; that one takes three times as long for the rows of a prefill.
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(eps))
        return (wide * scale).mul_(weight).to(x.dtype)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = residual.add_(x)
        return self.rms_norm(total, weight, eps), total

    def rope(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        half = x.shape[-1] // 2
        out = torch.empty_like(x)
        first, second = x[..., :half], x[..., half:]
        torch.mul(first, cos, out=out[..., :half]).addcmul_(second, sin, value=-1)
        torch.mul(second, cos, out=out[..., half:]).addcmul_(first, sin)
        return out

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def gelu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.gelu(gate, approximate="tanh").mul_(up)
