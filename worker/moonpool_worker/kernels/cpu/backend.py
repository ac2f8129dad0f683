"""The C++ backend: the torch backend with everything in bfloat16 that the library knows done there.

What it does not know (float32, other shapes) goes the torch backend's way, call by call.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence

import torch
from moonpool_api.geometry import GroupGeometry

from moonpool_worker.engine.batch import SequenceChunk
from moonpool_worker.kernels.cpu import structures
from moonpool_worker.kernels.cpu.decoder import LARGEST_HEAD, FusedDecoder, can_fuse
from moonpool_worker.kernels.cpu.library import library
from moonpool_worker.kernels.cpu.linear import CpuLinear
from moonpool_worker.kernels.cpu.memory import WeightMemory
from moonpool_worker.kernels.cpu.packed import KEPT, Kind, PackedMatrix, can_pack
from moonpool_worker.kernels.cpu.step import StepChunks
from moonpool_worker.kernels.decoder import DecoderParts, WholeDecoder
from moonpool_worker.kernels.linear import Linear, Weight
from moonpool_worker.kernels.torch_attention import AttentionStep
from moonpool_worker.kernels.torch_backend import TorchKernels
from moonpool_worker.weights.quantised import QuantisedMatrix


class CpuStep:
    """The plan of one step for one group: C structures, and the torch backend's plan when it is needed."""

    def __init__(self, chunks: Sequence[SequenceChunk], index: int, group: GroupGeometry, device: torch.device) -> None:
        self.native = StepChunks(chunks, index, group.rows)
        self.window = group.window or 0
        self._arguments = (chunks, index, group, device)
        self._torch: AttentionStep | None = None

    def torch(self, kernels: TorchKernels) -> AttentionStep:
        if self._torch is None:
            self._torch = TorchKernels.plan(kernels, *self._arguments)
        return self._torch


class CpuKernels(TorchKernels):
    """``int8``: dense weights are rounded to 8 bits in blocks of 32. Raises Unavailable where this cannot run."""

    name = "cpu"
    formats = frozenset(KEPT)

    def __init__(self, int8: bool = False) -> None:
        super().__init__()
        self._lib = library()
        self._memory = WeightMemory()
        self._dense = Kind.BYTE if int8 else Kind.PLAIN

    def linear(self, weight: Weight, bias: torch.Tensor | None = None) -> Linear:
        if not can_pack(weight) or (isinstance(weight, torch.Tensor) and weight.dtype != torch.bfloat16):
            return super().linear(weight, bias)
        kind = KEPT[weight.kind] if isinstance(weight, QuantisedMatrix) else self._dense
        return CpuLinear(self._lib, PackedMatrix(self._lib, self._memory, weight, bias, kind))

    def decoder(self, parts: DecoderParts) -> WholeDecoder | None:
        return FusedDecoder(self._lib, parts) if can_fuse(parts) else None

    def argmax(self, logits: torch.Tensor) -> list[int]:
        if logits.dtype != torch.float32 or not logits.is_contiguous():
            return super().argmax(logits)
        rows, width = logits.shape
        found = array("i", bytes(4 * rows))
        self._lib.mp_argmax(logits.data_ptr(), rows, width, found.buffer_info()[0])
        return found.tolist()

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        if not _bfloat16(x) or not _is_norm(weight):
            return super().rms_norm(x, weight, eps)
        if x.dim() != 2 or x.stride(1) != 1:
            x = x.contiguous()
        y = torch.empty(x.shape, dtype=x.dtype)
        self._norm(x, x.stride(-2), None, weight, eps, y)
        return y

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        dense = x.is_contiguous() and residual.is_contiguous()
        if not _bfloat16(x, residual) or not _is_norm(weight) or not dense:
            return super().add_rms_norm(x, residual, weight, eps)
        y = torch.empty_like(x)
        self._norm(x, x.shape[-1], residual.data_ptr(), weight, eps, y)
        return y, residual

    def _norm(
        self, x: torch.Tensor, stride: int, residual: int | None, weight: torch.Tensor, eps: float, y: torch.Tensor
    ) -> None:
        width, wide = x.shape[-1], weight.dtype == torch.float32
        rows = x.numel() // width
        self._lib.mp_rms_norm(x.data_ptr(), stride, residual, weight.data_ptr(), wide, eps, rows, width, y.data_ptr())

    def rope(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        tokens, heads, dim = x.shape
        dense = x.stride(2) == 1 and x.stride(1) == dim and cos.is_contiguous() and sin.is_contiguous()
        if not _bfloat16(x, cos, sin) or not dense or dim > LARGEST_HEAD:
            return super().rope(x, cos, sin)
        y = torch.empty(x.shape, dtype=x.dtype)
        self._lib.mp_rope(x.data_ptr(), x.stride(0), cos.data_ptr(), sin.data_ptr(), tokens, heads, dim, y.data_ptr())
        return y

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        if not _bfloat16(gate_up) or not gate_up.is_contiguous():
            return super().silu_mul(gate_up)
        tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
        y = torch.empty(tokens, width, dtype=gate_up.dtype)
        self._lib.mp_silu_mul(gate_up.data_ptr(), tokens, width, y.data_ptr())
        return y

    def plan(  # type: ignore[override]
        self, chunks: Sequence[SequenceChunk], index: int, group: GroupGeometry, device: torch.device
    ) -> CpuStep:
        if group.stride != 1:
            raise ValueError(f"group {group.name}: attention over rows of {group.stride} tokens is not paged attention")
        return CpuStep(chunks, index, group, device)

    def write_rows(self, plan: CpuStep, cache: torch.Tensor, rows: torch.Tensor) -> None:  # type: ignore[override]
        width = cache[0, 0].numel()
        dense = rows.stride(-1) == 1 and (rows.dim() < 3 or rows.stride(1) == rows.shape[2])
        if not _bfloat16(cache, rows) or not dense or not _whole_rows(cache):
            return super().write_rows(plan.torch(self), cache, rows)
        blocks, offsets = plan.native.slots()
        self._lib.mp_write_rows(
            rows.data_ptr(),
            rows.stride(0),
            blocks.ctypes.data,
            offsets.ctypes.data,
            rows.shape[0],
            width,
            cache.data_ptr(),
            cache.stride(0),
        )
        return None

    def attention(  # type: ignore[override]
        self,
        plan: CpuStep,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        scale: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        tokens, heads, dim = q.shape
        kv_heads = keys.shape[2]
        dense = q.stride(2) == 1 and q.stride(1) == dim
        fits = dim <= LARGEST_HEAD and dim % 2 == 0 and values.shape[-1] == dim and heads % kv_heads == 0
        if not _bfloat16(q, keys, values) or not dense or not fits or not (_whole_rows(keys) and _whole_rows(values)):
            return super().attention(plan.torch(self), q, keys, values, scale=scale, sinks=sinks)
        out = torch.empty(tokens, heads * dim, dtype=q.dtype)
        wide_sinks = None if sinks is None else sinks.float().contiguous()
        what = structures.Attention(
            plan.native.address,
            plan.native.count,
            heads,
            plan.window,
            dim**-0.5 if scale is None else scale,
            None if wide_sinks is None else wide_sinks.data_ptr(),
            q.data_ptr(),
            q.stride(0),
            out.data_ptr(),
        )
        cache = structures.Cache(
            keys.data_ptr(), values.data_ptr(), keys.stride(0), values.stride(0), keys.shape[1], kv_heads, dim
        )
        self._lib.mp_attention(ctypes.byref(what), ctypes.byref(cache))
        return out

    def latent_attention(  # type: ignore[override]
        self, plan: CpuStep, q: torch.Tensor, latent: torch.Tensor, value_dim: int, *, scale: float
    ) -> torch.Tensor:
        return super().latent_attention(plan.torch(self), q, latent, value_dim, scale=scale)


def _bfloat16(*tensors: torch.Tensor) -> bool:
    return all(tensor.dtype == torch.bfloat16 and tensor.device.type == "cpu" for tensor in tensors)


def _is_norm(weight: torch.Tensor) -> bool:
    return weight.dtype in (torch.bfloat16, torch.float32) and weight.is_contiguous()


def _whole_rows(cache: torch.Tensor) -> bool:
    """Whether the rows of a block lie side by side."""
    return cache[0].is_contiguous()
