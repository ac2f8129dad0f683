"""Stores a step's rows where the block tables say."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moonpool_worker.kernels.triton.step_plan import StepPlan

_BLOCK = 1024


@triton.jit
def write_rows_kernel(
    rows_ptr,
    cache_ptr,
    slots_ptr,
    row_stride,
    block_stride,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < SIZE
    values = tl.load(rows_ptr + row * row_stride + columns, mask=inside)
    tl.store(cache_ptr + slot // ROWS * block_stride + slot % ROWS * SIZE + columns, values, mask=inside)


def write_rows(plan: StepPlan, cache: torch.Tensor, rows: torch.Tensor) -> None:
    """``rows`` [T, *row] of any row stride into ``cache`` [blocks, rows, *row] of any block stride."""
    tokens = rows.shape[0]
    size = rows.numel() // max(tokens, 1)
    if not rows[:1].is_contiguous():
        rows = rows.contiguous()
    block = min(_BLOCK, triton.next_power_of_2(size))
    write_rows_kernel[(tokens, -(-size // block))](
        rows, cache, plan.slots, rows.stride(0), cache.stride(0), SIZE=size, ROWS=plan.rows, BLOCK=block, num_warps=4
    )
