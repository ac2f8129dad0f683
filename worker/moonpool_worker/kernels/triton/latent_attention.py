"""Multi-head latent attention in its absorbed form (DeepSeek-V2, 2024) over paged rows.

A row is read once for all heads, and is key and value in one: its first R elements are the value, all of them the key.
The product of queries and keys is taken in two parts, R and the rotated rest, as neither's sum is a power of two.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moonpool_worker.kernels.triton.launch import TileShape, architecture
from moonpool_worker.kernels.triton.paged_attention import (
    LOG2_E,
    SHORT_CHUNK_SPLIT,
    dot_in_parts,
    float32_part,
    split_length,
)
from moonpool_worker.kernels.triton.split_reduction import Partials, reduce_splits
from moonpool_worker.kernels.triton.step_plan import WORK_FIELDS, StepPlan, Tiling


@triton.jit
def attend_latent(
    acc,
    top,
    total,
    q,
    q_turned,
    q_at,
    live,
    latent_ptr,
    table_ptr,
    begin,
    end,
    first_seen,
    position,
    scale,
    block_stride,
    window,
    RANK: tl.constexpr,
    TURNED: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_T: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PART: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOW: tl.constexpr,
    PRECISION: tl.constexpr,
):
    columns = tl.arange(0, BLOCK_R)
    turned_columns = tl.arange(0, BLOCK_T)
    for start in range(begin, end, BLOCK_N):
        seen = start + tl.arange(0, BLOCK_N)
        readable = (seen >= first_seen) & (seen < end)
        if MASKED:
            block = tl.load(table_ptr + seen // ROWS, mask=readable, other=0).to(tl.int64)
        else:
            block = tl.load(table_ptr + seen // ROWS).to(tl.int64)
        row_ptr = latent_ptr + (block * block_stride + (seen % ROWS) * (RANK + TURNED))[:, None]
        if MASKED or BLOCK_R != RANK or BLOCK_T != TURNED:
            row = tl.load(row_ptr + columns[None, :], mask=readable[:, None] & (columns < RANK)[None, :], other=0.0)
            inside = readable[:, None] & (turned_columns < TURNED)[None, :]
            turned = tl.load(row_ptr + RANK + turned_columns[None, :], mask=inside, other=0.0)
        else:
            row = tl.load(row_ptr + columns[None, :])
            turned = tl.load(row_ptr + RANK + turned_columns[None, :])
        if PART:
            scores = dot_in_parts(q_at, live, row_ptr, readable, q.shape[0], BLOCK_N, RANK, BLOCK_R, PART, PRECISION)
        else:
            scores = tl.dot(q, tl.trans(row), input_precision=PRECISION)
        scores = tl.dot(q_turned, tl.trans(turned), scores, input_precision=PRECISION) * scale
        if MASKED:
            visible = (seen[None, :] <= position[:, None]) & readable[None, :]
            if WINDOW:
                visible = visible & (seen[None, :] > position[:, None] - window)
            scores = tl.where(visible, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        # A row that has seen nothing yet has -inf for its maximum; -inf - -inf would be NaN.
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(scores - base[:, None])
        fade = tl.exp2(top - base)
        total = total * fade + tl.sum(weights, 1)
        acc = tl.dot(weights.to(row.dtype), row, acc * fade[:, None], input_precision=PRECISION)
        top = new_top
    return acc, top, total


@triton.jit
def latent_attention_kernel(
    q_ptr,
    latent_ptr,
    out_ptr,
    partial_ptr,
    weight_ptr,
    table_ptr,
    work_ptr,
    scale,
    q_row,
    q_head,
    block_stride,
    table_row,
    window,
    HEADS: tl.constexpr,
    SLICE: tl.constexpr,
    SLICES: tl.constexpr,
    RANK: tl.constexpr,
    TURNED: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_T: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FIELDS: tl.constexpr,
    PART: tl.constexpr,
    WINDOW: tl.constexpr,
    PRECISION: tl.constexpr,
):
    lane = tl.program_id(0) % SLICES
    piece = work_ptr + (tl.program_id(0) // SLICES) * FIELDS
    table_ptr += tl.load(piece).to(tl.int64) * table_row
    step_row = tl.load(piece + 1).to(tl.int64)
    rows = tl.load(piece + 2)
    first = tl.load(piece + 3)
    begin = tl.load(piece + 4)
    end = tl.load(piece + 5)
    slot = tl.load(piece + 6).to(tl.int64)

    m = tl.arange(0, BLOCK_M)
    head = lane * SLICE + m % SLICE
    live = (m // SLICE < rows) & (head < HEADS)
    row = step_row + m // SLICE
    position = first + m // SLICE
    columns = tl.arange(0, BLOCK_R)
    turned_columns = tl.arange(0, BLOCK_T)
    inside = live[:, None] & (columns < RANK)[None, :]
    q_at = q_ptr + (row * q_row + head * q_head)[:, None]
    q = tl.load(q_at + columns[None, :], mask=inside, other=0.0)
    turned_inside = live[:, None] & (turned_columns < TURNED)[None, :]
    q_turned = tl.load(q_at + RANK + turned_columns[None, :], mask=turned_inside, other=0.0)

    acc = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    first_seen = 0
    everyone = begin
    if WINDOW:
        first_seen = tl.maximum(first - window + 1, 0)
    else:
        # All rows of the tile see all of these, so nothing is compared.
        everyone = tl.maximum(begin, tl.minimum(end, (first + 1) // BLOCK_N * BLOCK_N))
        acc, top, total = attend_latent(
            acc, top, total, q, q_turned, q_at, live, latent_ptr, table_ptr, begin, everyone, 0, position, scale,
            block_stride, window, RANK, TURNED, BLOCK_R, BLOCK_T, ROWS, BLOCK_N, PART, False, False, PRECISION,
        )  # fmt: skip
    acc, top, total = attend_latent(
        acc, top, total, q, q_turned, q_at, live, latent_ptr, table_ptr, everyone, end, first_seen, position, scale,
        block_stride, window, RANK, TURNED, BLOCK_R, BLOCK_T, ROWS, BLOCK_N, PART, True, WINDOW, PRECISION,
    )  # fmt: skip

    # A row of a tile may see nothing of this piece, and its weight is then zero.
    result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    if slot >= 0:
        at = (slot * SLICES + lane) * BLOCK_M + m
        tl.store(partial_ptr + at[:, None] * RANK + columns[None, :], result, mask=inside)
        tl.store(weight_ptr + at, top + tl.log2(total), mask=live)
    else:
        out_at = (row * HEADS + head)[:, None] * RANK + columns[None, :]
        tl.store(out_ptr + out_at, result.to(out_ptr.dtype.element_ty), mask=inside)


def latent_shape(rank: int, heads: int, dtype: torch.dtype) -> TileShape:
    """Sums of [rows, R] stand in registers: few rows, many warps, few positions."""
    rows = max(16, triton.next_power_of_2(heads))
    if dtype == torch.float32:
        return TileShape(16, 16, 8, 1)
    if rank <= 256 or rows == 16:
        # As for other decodes: rows wait for the block table's entries.
        return TileShape(min(rows, 32), 32, 8 if rank > 128 else 4, 5)
    # Hopper's products take 64 rows; before it more than 32 do not fit.
    return {80: TileShape(32, 32, 8, 2), 90: TileShape(min(rows, 64), 16 if rows > 32 else 32, 8, 2)}.get(
        architecture(), TileShape(min(rows, 64), 32, 8, 2)
    )


def latent_attention(
    plan: StepPlan, q: torch.Tensor, latent: torch.Tensor, value_dim: int, scale: float
) -> torch.Tensor:
    """``q`` [T, H, R + Dr] of any row and head stride; ``latent`` [blocks, rows, R + Dr]; returns [T, H, R]."""
    tokens, heads, dim = q.shape
    out = torch.empty((tokens, heads, value_dim), dtype=q.dtype, device=q.device)
    shape = latent_shape(value_dim, heads, q.dtype)
    slice_heads = min(heads, shape.block_m)
    slices = -(-heads // slice_heads)
    split = split_length(heads, value_dim * 4, dim * latent.element_size())
    for decodes in (True, False):
        queries = 1 if decodes else shape.block_m // slice_heads
        work = plan.work(Tiling(queries, split if decodes else SHORT_CHUNK_SPLIT, decodes))
        if not work.pieces.shape[0]:
            continue
        partials = Partials.empty(work.slots, slices, shape.block_m, value_dim, q.device)
        latent_attention_kernel[(work.pieces.shape[0] * slices,)](
            q, latent, out, partials.values, partials.weights, plan.table, work.pieces, scale * LOG2_E,
            q.stride(0), q.stride(1), latent.stride(0), plan.table.stride(0), plan.window or 0,
            HEADS=heads, SLICE=slice_heads, SLICES=slices, RANK=value_dim, TURNED=dim - value_dim,
            BLOCK_R=max(16, triton.next_power_of_2(value_dim)),
            BLOCK_T=max(16, triton.next_power_of_2(dim - value_dim)), ROWS=plan.rows, BLOCK_M=shape.block_m,
            BLOCK_N=shape.block_n, FIELDS=WORK_FIELDS, PART=float32_part(q.dtype, value_dim),
            WINDOW=plan.window is not None, PRECISION="tf32x3",
            num_warps=shape.warps, num_stages=shape.stages,
        )  # fmt: skip
        reduce_splits(work, partials, out, None, 1, slice_heads, slices, queries)
    return out
