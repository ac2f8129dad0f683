"""Causal attention over paged keys and values, for prompts and decodes alike.

FlashAttention's online softmax (Dao et al., 2022) over pieces of work from the step's plan. The query heads of one KV
head are rows of one tile, so that each key is read once for all of them. Blocks of positions begin at multiples of
their own length, counted from the text's start: cutting a prompt into other chunks, none of them short, changes no bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moonpool_worker.kernels.triton.launch import TileShape, architecture
from moonpool_worker.kernels.triton.split_reduction import Partials, reduce_splits
from moonpool_worker.kernels.triton.step_plan import ALIGNMENT, WORK_FIELDS, StepPlan, Tiling

LOG2_E = 1.4426950408889634
#: Positions per split where a chunk has several tokens, but few: a prompt that the cache holds nearly all of.
SHORT_CHUNK_SPLIT = 2048


@triton.jit
def dot_in_parts(
    q_at,
    live,
    k_at,
    readable,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PART: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Scores [BLOCK_M, BLOCK_N] of float32 rows, PART columns at a time: whole rows do not fit into registers."""
    scores = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(0, BLOCK_D, PART):
        columns = first + tl.arange(0, PART)
        there = (columns < DIM)[None, :]
        q = tl.load(q_at + columns[None, :], mask=live[:, None] & there, other=0.0)
        k = tl.load(k_at + columns[None, :], mask=readable[:, None] & there, other=0.0)
        scores = tl.dot(q, tl.trans(k), scores, input_precision=PRECISION)
    return scores


@triton.jit
def attend_positions(
    acc,
    top,
    total,
    q,
    q_at,
    live,
    k_ptr,
    v_ptr,
    table_ptr,
    begin,
    end,
    first_seen,
    last_seen,
    position,
    kv_head,
    scale,
    k_block,
    v_block,
    window,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PART: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOW: tl.constexpr,
    PRECISION: tl.constexpr,
):
    columns = tl.arange(0, BLOCK_D)
    for start in range(begin, end, BLOCK_N):
        seen = start + tl.arange(0, BLOCK_N)
        readable = (seen >= first_seen) & (seen < last_seen)
        if MASKED:
            block = tl.load(table_ptr + seen // ROWS, mask=readable, other=0).to(tl.int64)
        else:
            block = tl.load(table_ptr + seen // ROWS).to(tl.int64)
        inner = ((seen % ROWS) * KV_HEADS + kv_head) * DIM
        k_at = k_ptr + (block * k_block + inner)[:, None]
        v_at = v_ptr + (block * v_block + inner)[:, None] + columns[None, :]
        inside = readable[:, None] & (columns < DIM)[None, :]
        if PART:
            scores = dot_in_parts(q_at, live, k_at, readable, q.shape[0], BLOCK_N, DIM, BLOCK_D, PART, PRECISION)
        elif MASKED or BLOCK_D != DIM:
            k = tl.load(k_at + columns[None, :], mask=inside, other=0.0)
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        else:
            k = tl.load(k_at + columns[None, :])
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        scores *= scale
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
        acc = acc * fade[:, None]
        v = tl.load(v_at, mask=inside, other=0.0) if MASKED or BLOCK_D != DIM else tl.load(v_at)
        acc += tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
        top = new_top
    return acc, top, total


@triton.jit
def paged_attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    sinks_ptr,
    partial_ptr,
    weight_ptr,
    table_ptr,
    work_ptr,
    scale,
    q_row,
    q_head,
    k_block,
    v_block,
    table_row,
    window,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SLICE: tl.constexpr,
    SLICES: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FIELDS: tl.constexpr,
    PART: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    lane = tl.program_id(0) % (KV_HEADS * SLICES)
    piece = work_ptr + (tl.program_id(0) // (KV_HEADS * SLICES)) * FIELDS
    table_ptr += tl.load(piece).to(tl.int64) * table_row
    step_row = tl.load(piece + 1).to(tl.int64)
    rows = tl.load(piece + 2)
    first = tl.load(piece + 3)
    begin = tl.load(piece + 4)
    end = tl.load(piece + 5)
    slot = tl.load(piece + 6).to(tl.int64)

    kv_head = lane // SLICES
    m = tl.arange(0, BLOCK_M)
    in_group = (lane % SLICES) * SLICE + m % SLICE
    live = (m // SLICE < rows) & (in_group < GROUP)
    head = kv_head * GROUP + in_group
    row = step_row + m // SLICE
    position = first + m // SLICE
    columns = tl.arange(0, BLOCK_D)
    inside = live[:, None] & (columns < DIM)[None, :]
    q_at = q_ptr + (row * q_row + head * q_head)[:, None]
    q = tl.load(q_at + columns[None, :], mask=inside, other=0.0)

    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    if SINKS and slot < 0:
        # A sink is a position without a value. Of a tile in several pieces the reduction adds it.
        top = tl.load(sinks_ptr + head, mask=live, other=0.0).to(tl.float32) * 1.4426950408889634
        total += 1.0
    first_seen = 0
    everyone = begin
    if WINDOW:
        first_seen = tl.maximum(first - window + 1, 0)
    else:
        # All rows of the tile see all of these, so nothing is compared.
        everyone = tl.maximum(begin, tl.minimum(end, (first + 1) // BLOCK_N * BLOCK_N))
        acc, top, total = attend_positions(
            acc, top, total, q, q_at, live, k_ptr, v_ptr, table_ptr, begin, everyone, 0, everyone, position, kv_head,
            scale, k_block, v_block, window, KV_HEADS, DIM, BLOCK_D, ROWS, BLOCK_N, PART, False, False, PRECISION,
        )  # fmt: skip
    acc, top, total = attend_positions(
        acc, top, total, q, q_at, live, k_ptr, v_ptr, table_ptr, everyone, end, first_seen, end, position, kv_head,
        scale, k_block, v_block, window, KV_HEADS, DIM, BLOCK_D, ROWS, BLOCK_N, PART, True, WINDOW, PRECISION,
    )  # fmt: skip

    # A row of a tile may see nothing of this piece, and its weight is then zero.
    result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    if slot >= 0:
        at = (slot * KV_HEADS * SLICES + lane) * BLOCK_M + m
        tl.store(partial_ptr + at[:, None] * DIM + columns[None, :], result, mask=inside)
        tl.store(weight_ptr + at, top + tl.log2(total), mask=live)
    else:
        out_at = (row * (KV_HEADS * GROUP) + head)[:, None] * DIM + columns[None, :]
        tl.store(out_ptr + out_at, result.to(out_ptr.dtype.element_ty), mask=inside)


def decode_shape(dim: int, group: int, dtype: torch.dtype) -> TileShape:
    """For chunks of one token: as few rows as the matrix units take, as the keys' bytes are what it costs."""
    block_m = min(max(16, triton.next_power_of_2(group)), 64)
    if dtype == torch.float32:
        return TileShape(min(block_m, 32 if dim <= 64 else 16), 32, 8, 2)
    # Keys wait for the block table's entries, which takes half of the stages; two blocks are on their way at a time.
    return TileShape(block_m, 64 if dim <= 128 else 32, 4, 5, 224)


def chunk_shape(dim: int, dtype: torch.dtype) -> TileShape:
    """For chunks of many tokens: as many rows as the registers hold."""
    if dtype == torch.float32:
        return TileShape(32 if dim <= 64 else 16, 32, 8, 2)
    if dim > 128:
        return TileShape(64, 32, 8, 2, 255)
    if dim <= 64:
        return TileShape(128, 64 if architecture() >= 90 else 32, 8, 3, 168)
    # Before Hopper the left operand of a product stands in registers too.
    return TileShape(128, 64 if architecture() >= 90 else 32, 8, 3)


def float32_part(dtype: torch.dtype, dim: int) -> int:
    """Columns that float32 rows are multiplied by at a time; 0: all."""
    return 64 if dtype == torch.float32 and dim > 64 else 0


def split_length(group: int, value_bytes: int, position_bytes: int) -> int:
    """Positions per split, 256 to 2048: enough that partial results move an eighth of the bytes that keys do.

    ``group``: rows of a tile that share a KV head; ``value_bytes``: of one row's partial result; ``position_bytes``: of
    one position's keys and values.
    """
    wanted = 8 * 2 * group * value_bytes // position_bytes
    return min(max(256, triton.next_power_of_2(wanted)), 2048)


def paged_attention(
    plan: StepPlan,
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """``q`` [T, H, D] of any row and head stride; ``keys``, ``values`` [blocks, rows, K, D]; returns [T, H, D].

    ``sinks`` [H]: logits without a value. Scores, weights and sums are float32.
    """
    _, heads, dim = q.shape
    kv_heads = keys.shape[2]
    group = heads // kv_heads
    out = torch.empty((q.shape[0], heads, dim), dtype=q.dtype, device=q.device)
    split = split_length(group, dim * 4, 2 * dim * keys.element_size())
    for decodes in (True, False):
        shape = decode_shape(dim, group, q.dtype) if decodes else chunk_shape(dim, q.dtype)
        assert ALIGNMENT % shape.block_n == 0
        slice_heads = min(group, shape.block_m)
        slices = -(-group // slice_heads)
        queries = 1 if decodes else shape.block_m // slice_heads
        work = plan.work(Tiling(queries, split if decodes else SHORT_CHUNK_SPLIT, decodes))
        if not work.pieces.shape[0]:
            continue
        partials = Partials.empty(work.slots, kv_heads * slices, shape.block_m, dim, q.device)
        paged_attention_kernel[(work.pieces.shape[0] * kv_heads * slices,)](
            q, keys, values, out, sinks, partials.values, partials.weights, plan.table, work.pieces,
            scale * LOG2_E, q.stride(0), q.stride(1), keys.stride(0), values.stride(0), plan.table.stride(0),
            plan.window or 0,
            KV_HEADS=kv_heads, GROUP=group, SLICE=slice_heads, SLICES=slices, DIM=dim,
            BLOCK_D=max(16, triton.next_power_of_2(dim)), ROWS=plan.rows, BLOCK_M=shape.block_m,
            BLOCK_N=shape.block_n, FIELDS=WORK_FIELDS, PART=float32_part(q.dtype, dim),
            WINDOW=plan.window is not None, SINKS=sinks is not None, PRECISION="tf32x3",
            num_warps=shape.warps, num_stages=shape.stages, maxnreg=shape.registers,
        )  # fmt: skip
        reduce_splits(work, partials, out, sinks, kv_heads, slice_heads, slices, queries)
    return out
