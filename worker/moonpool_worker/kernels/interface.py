"""What a kernel backend offers.

Shapes: T tokens of a step, H query heads, K KV heads, D head dimension. Cache tensors are the arena's views of one
layer: history ``[blocks, rows, *row]``, state ``[blocks, *shape]``. Their first dimension may be strided (a block of
several planes), the others are contiguous; two blocks with consecutive ids are neighbours in memory.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from typing import Any, Protocol

import structlog
import torch
from moonpool_api.geometry import GroupGeometry

from moonpool_worker.engine.batch import SequenceChunk
from moonpool_worker.kernels.decoder import DecoderParts, WholeDecoder
from moonpool_worker.kernels.linear import Linear, Weight

_log = structlog.get_logger()

#: What a backend prepares once per step for one group, for all its layers. Each backend has its own.
AttentionPlan = Any
StatePlan = Any


class Kernels(Protocol):
    name: str
    #: Where weights, cache and inputs are to live.
    device: torch.device
    #: GGUF's block formats (Q8_0, …) that ``linear`` multiplies as they are, by a model in bfloat16.
    formats: frozenset[str]

    # -- rows ------------------------------------------------------------------------------------------------------

    def linear(self, weight: Weight, bias: torch.Tensor | None = None) -> Linear:
        """Take a weight [out, in]; the backend may keep a copy in another layout, so drop the original."""
        ...

    def decoder(self, parts: DecoderParts) -> WholeDecoder | None:
        """All of an ordinary decoder in one call; None where the backend takes it layer by layer."""
        ...

    def argmax(self, logits: torch.Tensor) -> list[int]:
        """The likeliest token of each row of float32 [rows, vocab]; of equals the first."""
        ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """[..., hidden] → same, computed in float32 as in the RMSNorm paper (Zhang and Sennrich, 2019)."""
        ...

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``residual + x`` and its norm: (norm, sum), both [T, hidden]. ``residual`` may be overwritten by the sum."""
        ...

    def rope(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotate halves. ``x`` [T, heads, D]; ``cos``, ``sin`` [T, 1, D / 2]; returns [T, heads, D]."""
        ...

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """[T, 2 * ffn] (gate, up) → silu(gate) * up, [T, ffn]."""
        ...

    def gelu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """[T, 2 * ffn] (gate, up) → gelu(gate) * up with GELU's tanh approximation, [T, ffn]."""
        ...

    # -- history: attention over paged rows ------------------------------------------------------------------------

    def plan(
        self, chunks: Sequence[SequenceChunk], index: int, group: GroupGeometry, device: torch.device
    ) -> AttentionPlan:
        """For history group ``index`` of the chunks' tables. A group's ``window`` is how far back it looks."""
        ...

    def write_rows(self, plan: AttentionPlan, cache: torch.Tensor, rows: torch.Tensor) -> None:
        """Store this step's ``rows`` [T, *row] into a plane of a layer, ``cache`` [blocks, rows, *row]. Stride 1."""
        ...

    def attention(
        self,
        plan: AttentionPlan,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        scale: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Causal attention of each chunk over its own past, its own rows being in the cache already.

        ``q`` [T, H, D]; ``keys``, ``values`` [blocks, rows, K, D]; returns [T, H * D]. ``scale``: D ** -0.5 when None.
        ``sinks`` [H]: a logit per head that takes part in the softmax and has no value (gpt-oss).
        """
        ...

    def latent_attention(
        self, plan: AttentionPlan, q: torch.Tensor, latent: torch.Tensor, value_dim: int, *, scale: float
    ) -> torch.Tensor:
        """Multi-head latent attention in its absorbed form (DeepSeek-V2, 2024): one KV head shared by all.

        ``q`` [T, H, R + Dr]; ``latent`` [blocks, rows, R + Dr], whose first ``value_dim`` = R elements are the value;
        returns [T, H, R].
        """
        ...

    # -- state: recurrences ----------------------------------------------------------------------------------------

    def state_plan(self, chunks: Sequence[SequenceChunk], index: int, device: torch.device) -> StatePlan:
        """For state group ``index`` of the chunks' states."""
        ...

    def causal_conv(
        self,
        plan: StatePlan,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        states: torch.Tensor,
        *,
        silu: bool = True,
    ) -> torch.Tensor:
        """Depthwise causal convolution. ``x`` [T, C], ``weight`` [C, W], ``bias`` [C]; ``states`` [blocks, C, W - 1],
        the last W - 1 inputs, oldest first; returns [T, C] after an optional SiLU."""
        ...

    def gated_delta(
        self,
        plan: StatePlan,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        states: torch.Tensor,
    ) -> torch.Tensor:
        """Gated delta rule (Yang et al., Gated DeltaNet, 2024; with a decay per channel it is Kimi Delta Attention).

        S ← exp(g) S; S ← S + k ⊗ beta (v - kᵀS); o = qᵀS. ``q``, ``k`` [T, H, Dk], normalised and scaled by the caller;
        ``v`` [T, H, Dv]; ``g`` [T, H] (GDN) or [T, H, Dk] (KDA), the logarithm of the decay, float32; ``beta`` [T, H];
        ``states`` [blocks, H, Dk, Dv] float32; returns [T, H, Dv] of v's dtype.
        """
        ...

    def mamba2(
        self,
        plan: StatePlan,
        x: torch.Tensor,
        dt: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        d: torch.Tensor,
        states: torch.Tensor,
    ) -> torch.Tensor:
        """State-space duality (Dao and Gu, Mamba-2, 2024): S ← exp(dt a) S + dt x ⊗ b; y = S c + d x.

        ``x`` [T, H, Dv]; ``dt`` [T, H] after softplus, float32; ``a``, ``d`` [H]; ``b``, ``c`` [T, G, N], head h uses
        group h * G // H; ``states`` [blocks, H, Dv, N] float32; returns [T, H, Dv] of x's dtype.
        """
        ...


class BackendError(ValueError):
    """The backend that was asked for cannot run here; the message says what can."""


def select_backend(name: str, quantization: str = "none") -> Kernels:
    """``triton``, for GPUs, ``cpu``, for CPUs with AVX-512 and bfloat16, or ``torch``, for all CPUs; ``auto`` takes the
    first that can run here.

    ``quantization``: ``int8`` rounds dense weights, on the backend cpu. TRITON_INTERPRET=1 lets ``triton`` run without
    a GPU, for tests. Raises BackendError for one that is not here.
    """
    if name == "auto":
        name = "triton" if torch.cuda.is_available() else _fastest_for_cpus()
    if name == "cpu":
        return _cpu(quantization)
    if quantization != "none":
        raise BackendError(f"attention backend {name} does not quantise weights; use --quantization none")
    if name == "torch":
        from moonpool_worker.kernels.torch_backend import TorchKernels

        return TorchKernels()
    if name == "triton":
        if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
            raise BackendError("attention backend triton needs a GPU; use auto or torch here")
        if importlib.util.find_spec("triton") is None:
            raise BackendError("attention backend triton needs the package triton, which is not installed here")
        from moonpool_worker.kernels.triton.backend import TritonKernels

        return TritonKernels()
    raise BackendError(f"there is no attention backend {name!r}; use auto, cpu, torch or triton")


def _cpu(quantization: str) -> Kernels:
    from moonpool_worker.kernels.cpu.backend import CpuKernels
    from moonpool_worker.kernels.cpu.library import Unavailable

    try:
        return CpuKernels(int8=quantization == "int8")
    except Unavailable as reason:
        raise BackendError(f"attention backend cpu cannot run here: {reason}; use auto or torch") from reason


def _fastest_for_cpus() -> str:
    from moonpool_worker.kernels.cpu.library import Unavailable, library

    try:
        library()
    except Unavailable as reason:
        _log.warning("the torch backend computes; cpu would be faster", reason=str(reason))
        return "torch"
    return "cpu"
