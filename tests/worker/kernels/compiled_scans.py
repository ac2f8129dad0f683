"""The scan kernels at the sizes of real models: what is compiled for GPUs that are not here."""

from __future__ import annotations

from collections.abc import Callable

import torch
from moonpool_worker.engine.batch import SequenceChunk, StateSlots
from moonpool_worker.kernels.triton.scan_plan import ScanPlan
from moonpool_worker.kernels.triton.scans_backend import TritonScans

META = torch.device("meta")
KERNELS = TritonScans()
ROWS = 2049


def _plan() -> ScanPlan:
    chunks = [
        SequenceChunk([0] * 2048, 0, ((),), states=(StateSlots(0, [(1024, 3), (2048, 4)]),)),
        SequenceChunk([0], 8, ((),), states=(StateSlots(5, [(9, 5)]),)),
    ]
    return KERNELS.state_plan(chunks, 0, META)


def _of(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def _states(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """With other planes between two blocks."""
    size = torch.Size(shape).numel()
    return torch.empty(16, 2 * size, dtype=dtype, device=META)[:, :size].unflatten(1, shape)


def _conv(channels: int) -> None:
    states = _states(channels, 3, dtype=torch.bfloat16)
    KERNELS.causal_conv(_plan(), _of(ROWS, channels), _of(channels, 4), None, states)


def _delta(heads: int, by_channel: bool, dtype: torch.dtype = torch.bfloat16) -> None:
    q, k, v = (_of(ROWS, heads, 128, dtype=dtype) for _ in range(3))
    g = _of(ROWS, heads, 128, dtype=torch.float32) if by_channel else _of(ROWS, heads, dtype=torch.float32)
    KERNELS.gated_delta(_plan(), q, k, v, g, _of(ROWS, heads, dtype=torch.float32), _states(heads, 128, 128))


def _mamba2(heads: int, dtype: torch.dtype = torch.bfloat16) -> None:
    b, c = _of(ROWS, 1, 128, dtype=dtype), _of(ROWS, 1, 128, dtype=dtype)
    dt, a = _of(ROWS, heads, dtype=torch.float32), _of(heads, dtype=torch.float32)
    KERNELS.mamba2(_plan(), _of(ROWS, heads, 64, dtype=dtype), dt, a, b, c, a, _states(heads, 64, 128))


CASES: dict[str, Callable[[], object]] = {
    "conv, Qwen3-Next": lambda: _conv(8192),
    "gated delta, Qwen3-Next": lambda: _delta(32, by_channel=False),
    "gated delta, float32": lambda: _delta(32, by_channel=False, dtype=torch.float32),
    "gated delta by channel, Kimi-Linear": lambda: _delta(32, by_channel=True),
    "gated delta by channel, float32": lambda: _delta(32, by_channel=True, dtype=torch.float32),
    "mamba2, 2.7B": lambda: _mamba2(80),
    "mamba2, float32": lambda: _mamba2(80, dtype=torch.float32),
}
