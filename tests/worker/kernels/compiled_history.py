"""Kernels over rows and history groups, at the shapes of models that exist, for `compile_check`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from moonpool_api.geometry import GroupGeometry, PlaneGeometry
from moonpool_worker.engine.batch import SequenceChunk
from moonpool_worker.kernels.triton.activations import gelu_mul, silu_mul
from moonpool_worker.kernels.triton.latent_attention import latent_attention
from moonpool_worker.kernels.triton.paged_attention import paged_attention
from moonpool_worker.kernels.triton.rms_norm import add_rms_norm, rms_norm
from moonpool_worker.kernels.triton.rope import rope
from moonpool_worker.kernels.triton.sampling import sample
from moonpool_worker.kernels.triton.step_plan import StepPlan, make_plan
from moonpool_worker.kernels.triton.write_rows import write_rows

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def meta(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def step(row: tuple[int, ...], window: int | None = None, page: int = 16) -> StepPlan:
    """Decodes of several pieces, a prompt, and a few tokens behind a long past: 304 tokens."""
    plane = PlaneGeometry(name="rows", shape=row, dtype="bfloat16")
    group = GroupGeometry(name="group", block_tokens=page, layers=(0,), planes=(plane,), window=window)
    table = (range(1, 8192 // page),)
    chunks = [
        SequenceChunk([0], 8000, table),
        SequenceChunk([0] * 300, 2000, table),
        SequenceChunk([0] * 3, 8000, table),
    ]
    return make_plan(chunks, 0, group, "meta")


def attention(
    heads: int, kv_heads: int, dim: int, dtype: torch.dtype = BF16, window: int | None = None, sinks: bool = False
) -> None:
    cache = meta(999, 16, kv_heads, dim, dtype=dtype)
    plan = step((kv_heads, dim), window)
    paged_attention(plan, meta(304, heads, dim, dtype=dtype), cache, cache, 0.1, meta(heads) if sinks else None)


def latent(heads: int, dtype: torch.dtype = BF16) -> None:
    plan = step((576,), page=64)
    latent_attention(plan, meta(304, heads, 576, dtype=dtype), meta(999, 64, 576, dtype=dtype), 512, 0.1)


def rows() -> None:
    write_rows(step((8, 128)), meta(999, 16, 8, 128), meta(304, 8, 128))
    for hidden in (640, 8192):
        rms_norm(meta(304, hidden), meta(hidden), 1e-5)
        add_rms_norm(meta(304, hidden), meta(304, hidden), meta(hidden), 1e-5)
    rms_norm(meta(304, 40, 128)[:, :32], meta(128), 1e-5)
    rope(meta(304, 40, 128)[:, :36], meta(304, 1, 64), meta(304, 1, 64))
    silu_mul(meta(304, 2 * 14336))
    gelu_mul(meta(304, 2 * 2048))


def sampling() -> None:
    fields = [meta(256, dtype=dtype) for dtype in (FP32, torch.int32, FP32, torch.int64, torch.int32)]
    sample(meta(256, 151936, dtype=FP32), *fields)


CASES: dict[str, Callable[[], object]] = {
    "llama-3-70b": lambda: attention(64, 8, 128),
    "llama-3-8b in float16": lambda: attention(32, 8, 128, FP16),
    "mistral-7b": lambda: attention(32, 8, 128, window=4096),
    "smollm2-135m": lambda: attention(9, 3, 64),
    "gpt-oss": lambda: attention(64, 8, 64, window=128, sinks=True),
    "gemma-3-27b": lambda: attention(32, 16, 128, window=1024),
    "gemma-3-270m": lambda: attention(4, 1, 256),
    "gemma-3-270m, its windows": lambda: attention(4, 1, 256, window=512),
    "phi-2, 80 dimensions": lambda: attention(32, 32, 80),
    "192 dimensions": lambda: attention(16, 16, 192),
    "falcon-7b, one KV head": lambda: attention(71, 1, 64),
    "128 dimensions in float32": lambda: attention(32, 8, 128, FP32),
    "256 dimensions in float32": lambda: attention(8, 4, 256, FP32),
    "deepseek-v3": lambda: latent(128),
    "deepseek-v3 on 8 devices": lambda: latent(16),
    "deepseek-v3 in float32": lambda: latent(16, FP32),
    "rows": rows,
    "sampling": sampling,
}
