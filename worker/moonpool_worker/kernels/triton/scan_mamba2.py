"""Mamba-2 in Triton: a program has a part of one head's state in registers and walks over a sequence, tile by tile, or
token by token for decodes and in float32.

Dual form within a tile (Dao and Gu, Transformers are SSMs, 2024), as in :mod:`moonpool_worker.kernels.scans.mamba2`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moonpool_worker.kernels.scans.segments import TILE
from moonpool_worker.kernels.triton.scan_plan import ScanPart, ScanPlan, by_rows
from moonpool_worker.kernels.triton.scan_store import store_states


@triton.jit
def _walk(
    x,
    dt,
    a,
    b,
    c,
    d,
    states,
    out,
    tile_first,
    tile_rows,
    tile_stores,
    sequence_tiles,
    source,
    store_block,
    x_stride,
    dt_stride,
    b_stride,
    c_stride,
    block_stride,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    DV: tl.constexpr,
    N: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    sequence, head = tl.program_id(0), tl.program_id(1)
    group = head * GROUPS // HEADS
    v = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    n = tl.arange(0, BLOCK_N)
    t = tl.arange(0, TILE)
    dtype = x.dtype.element_ty
    inner = head * DV * N + v[:, None] * N + n[None, :]
    held = (v < DV)[:, None] & (n < N)[None, :]
    before = states + tl.load(source + sequence).to(tl.int64) * block_stride
    state = tl.load(before + inner, mask=held, other=0.0)
    rate, skip = tl.load(a + head).to(tl.float32), tl.load(d + head).to(tl.float32)
    causal = t[:, None] >= t[None, :]
    for tile in range(tl.load(sequence_tiles + sequence), tl.load(sequence_tiles + sequence + 1)):
        row = tl.load(tile_first + tile) + t
        here = t < tl.load(tile_rows + tile)
        step = tl.load(dt + row * dt_stride + head, mask=here, other=0.0).to(tl.float32)
        total = tl.cumsum(step * rate, axis=0)
        end = tl.sum(tl.where(t == tl.load(tile_rows + tile) - 1, total, 0.0), axis=0)
        narrow, wide = here[:, None] & (v < DV)[None, :], here[:, None] & (n < N)[None, :]
        inputs = tl.load(x + row[:, None] * x_stride + head * DV + v[None, :], mask=narrow, other=0.0)
        keys = tl.load(b + row[:, None] * b_stride + group * N + n[None, :], mask=wide, other=0.0)
        queries = tl.load(c + row[:, None] * c_stride + group * N + n[None, :], mask=wide, other=0.0)
        overlap = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
        apart = tl.where(causal, total[:, None] - total[None, :], float("-inf"))
        mixing = overlap * tl.exp(apart) * step[None, :]
        y = tl.dot(mixing.to(dtype), inputs, input_precision=PRECISION)
        past = tl.dot(queries, tl.trans(state).to(dtype), input_precision=PRECISION)
        y += past * tl.exp(total)[:, None] + inputs.to(tl.float32) * skip
        tl.store(out + row[:, None] * (HEADS * DV) + head * DV + v[None, :], y.to(dtype), mask=narrow)
        written = inputs.to(tl.float32) * (step * tl.exp(end - total))[:, None]
        state = state * tl.exp(end) + tl.dot(tl.trans(written.to(dtype)), keys, input_precision=PRECISION)
        first, last = tl.load(tile_stores + tile), tl.load(tile_stores + tile + 1)
        store_states(states, inner, held, state, store_block, first, last, block_stride)


@triton.jit
def _recur(
    x,
    dt,
    a,
    b,
    c,
    d,
    states,
    out,
    tile_first,
    tile_rows,
    tile_stores,
    sequence_tiles,
    source,
    store_block,
    x_stride,
    dt_stride,
    b_stride,
    c_stride,
    block_stride,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    DV: tl.constexpr,
    N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    sequence, head = tl.program_id(0), tl.program_id(1)
    group = head * GROUPS // HEADS
    v = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    n = tl.arange(0, BLOCK_N)
    inner = head * DV * N + v[:, None] * N + n[None, :]
    held = (v < DV)[:, None] & (n < N)[None, :]
    before = states + tl.load(source + sequence).to(tl.int64) * block_stride
    state = tl.load(before + inner, mask=held, other=0.0)
    rate, skip = tl.load(a + head).to(tl.float32), tl.load(d + head).to(tl.float32)
    for tile in range(tl.load(sequence_tiles + sequence), tl.load(sequence_tiles + sequence + 1)):
        first = tl.load(tile_first + tile)
        for row in range(first, first + tl.load(tile_rows + tile)):
            step = tl.load(dt + row * dt_stride + head).to(tl.float32)
            inputs = tl.load(x + row * x_stride + head * DV + v, mask=v < DV, other=0.0).to(tl.float32)
            keys = tl.load(b + row * b_stride + group * N + n, mask=n < N, other=0.0).to(tl.float32)
            queries = tl.load(c + row * c_stride + group * N + n, mask=n < N, other=0.0).to(tl.float32)
            state = state * tl.exp(step * rate) + (inputs * step)[:, None] * keys[None, :]
            y = tl.sum(state * queries[None, :], axis=1) + inputs * skip
            tl.store(out + row * (HEADS * DV) + head * DV + v, y.to(out.dtype.element_ty), mask=v < DV)
        store, last = tl.load(tile_stores + tile), tl.load(tile_stores + tile + 1)
        store_states(states, inner, held, state, store_block, store, last, block_stride)


def mamba2(
    plan: ScanPlan,
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor,
    states: torch.Tensor,
) -> torch.Tensor:
    """See :class:`moonpool_worker.kernels.interface.Kernels`. Products of x's dtype, sums and states float32."""
    x, dt, b, c = (by_rows(part) for part in (x, dt, b, c))
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if plan.decodes is not None:
        by_token(plan.decodes, x, dt, a, b, c, d, states, out)
    if plan.prompts is not None:
        way = by_token if x.dtype == torch.float32 else by_tile
        way(plan.prompts, x, dt, a, b, c, d, states, out)
    return out


def by_token(part: ScanPart, *inputs: torch.Tensor) -> None:
    """All rows of ``part`` in order; ``inputs`` are those of :func:`mamba2` and the output."""
    heads, dv = inputs[0].shape[1:]
    block = min(32, triton.next_power_of_2(dv))
    grid = (part.sequences, heads, triton.cdiv(dv, block))
    _recur[grid](*inputs, *_tables(part), *_strides(*inputs), **_sizes(*inputs), BLOCK_V=block)


def by_tile(part: ScanPart, *inputs: torch.Tensor) -> None:
    """64 rows at a time; ``inputs`` are those of :func:`mamba2` and the output."""
    heads, dv = inputs[0].shape[1:]
    block = min(32, max(16, triton.next_power_of_2(dv)))
    grid = (part.sequences, heads, triton.cdiv(dv, block))
    precision = "ieee" if inputs[0].dtype == torch.float32 else "tf32"
    options = {"TILE": TILE, "BLOCK_V": block, "PRECISION": precision, "num_warps": 8, "num_stages": 1}
    _walk[grid](*inputs, *_tables(part), *_strides(*inputs), **_sizes(*inputs), **options)


def _tables(part: ScanPart) -> tuple[torch.Tensor, ...]:
    return (part.tile_first, part.tile_rows, part.tile_stores, part.sequence_tiles, part.source, part.store_block)


def _strides(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor,
    states: torch.Tensor,
    out: torch.Tensor,
) -> tuple[int, ...]:
    return (x.stride(0), dt.stride(0), b.stride(0), c.stride(0), states.stride(0))


def _sizes(x: torch.Tensor, dt: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *rest: torch.Tensor) -> dict[str, int]:
    groups, n = b.shape[1:]
    wide = max(16, triton.next_power_of_2(n))
    return {"HEADS": x.shape[1], "GROUPS": groups, "DV": x.shape[2], "N": n, "BLOCK_N": wide}
