"""The gated delta rule in Triton, with one decay per head (GDN) or one per channel (KDA).

The mathematics is that of :mod:`moonpool_worker.kernels.scans.gated_delta`. A prompt takes three kernels: the products
of keys and queries within each tile; the solution of each tile's triangular system; and a walk over the tiles of a
sequence with the state in registers. Decodes take one, token by token, and so do prompts in float32: products that are
exact enough for it do not fit into registers, and no GPU serves float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moonpool_worker.kernels.scans.segments import TILE
from moonpool_worker.kernels.triton.scan_plan import ScanPart, ScanPlan, by_rows
from moonpool_worker.kernels.triton.scan_store import store_states

#: Rows whose decays per channel are multiplied out; between blocks of them a common reference is taken.
_SUB = 16


@triton.jit
def _products_by_head(
    q,
    k,
    g,
    beta,
    total,
    system,
    reads,
    tile_first,
    tile_rows,
    q_stride,
    k_stride,
    g_stride,
    beta_stride,
    HEADS: tl.constexpr,
    DK: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    tile, head = tl.program_id(0), tl.program_id(1)
    t, dim = tl.arange(0, TILE), tl.arange(0, BLOCK_K)
    row = tl.load(tile_first + tile) + t
    here = t < tl.load(tile_rows + tile)
    valid = here[:, None] & (dim < DK)[None, :]
    logs = tl.cumsum(tl.load(g + row * g_stride + head, mask=here, other=0.0), axis=0)
    tl.store(total + row * HEADS + head, logs, mask=here)
    apart = tl.where(t[:, None] >= t[None, :], logs[:, None] - logs[None, :], float("-inf"))
    decay = tl.exp(apart)
    keys = tl.load(k + row[:, None] * k_stride + head * DK + dim[None, :], mask=valid, other=0.0)
    rate = tl.load(beta + row * beta_stride + head, mask=here, other=0.0).to(tl.float32)
    square = (tile * HEADS + head) * TILE * TILE + t[:, None] * TILE + t[None, :]
    tl.store(system + square, tl.dot(keys, tl.trans(keys), input_precision=PRECISION) * decay * rate[:, None])
    queries = tl.load(q + row[:, None] * q_stride + head * DK + dim[None, :], mask=valid, other=0.0)
    read = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * decay
    tl.store(reads + square, read.to(reads.dtype.element_ty))


@triton.jit
def _totals_by_channel(
    g,
    total,
    tile_first,
    tile_rows,
    g_stride,
    HEADS: tl.constexpr,
    DK: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    tile, head = tl.program_id(0), tl.program_id(1)
    t, dim = tl.arange(0, TILE), tl.program_id(2) * BLOCK_K + tl.arange(0, BLOCK_K)
    row = tl.load(tile_first + tile) + t
    valid = (t < tl.load(tile_rows + tile))[:, None] & (dim < DK)[None, :]
    logs = tl.load(g + row[:, None] * g_stride + head * DK + dim[None, :], mask=valid, other=0.0)
    tl.store(total + (row[:, None] * HEADS + head) * DK + dim[None, :], tl.cumsum(logs, axis=0), mask=valid)


@triton.jit
def _products_by_channel(
    q,
    k,
    beta,
    total,
    system,
    reads,
    tile_first,
    tile_rows,
    q_stride,
    k_stride,
    beta_stride,
    HEADS: tl.constexpr,
    DK: tl.constexpr,
    TILE: tl.constexpr,
    SUB: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    tile, head = tl.program_id(0), tl.program_id(1)
    top = tl.program_id(2) * SUB
    count = tl.load(tile_rows + tile)
    if top < count:
        first = tl.load(tile_first + tile)
        dim = tl.arange(0, BLOCK_K)
        channel = (dim < DK)[None, :]
        t = top + tl.arange(0, SUB)
        row = first + t
        here = t < count
        valid = here[:, None] & channel
        logs = tl.load(total + (row[:, None] * HEADS + head) * DK + dim[None, :], mask=valid, other=0.0)
        keys = tl.load(k + row[:, None] * k_stride + head * DK + dim[None, :], mask=valid, other=0.0).to(tl.float32)
        queries = tl.load(q + row[:, None] * q_stride + head * DK + dim[None, :], mask=valid, other=0.0)
        queries = queries.to(tl.float32)
        rate = tl.load(beta + row * beta_stride + head, mask=here, other=0.0).to(tl.float32)
        square = (tile * HEADS + head) * TILE * TILE
        if top > 0:
            # Against the row before the block, both factors' exponents are at most 0.
            last = first + top - 1
            reference = tl.load(total + (last * HEADS + head) * DK + dim, mask=dim < DK, other=0.0)[None, :]
            since = tl.exp(tl.where(valid, logs - reference, float("-inf")))
            left_keys, left_queries = keys * since, queries * since
            for left in range(0, top, SUB):
                i = left + tl.arange(0, SUB)
                past = (first + i)[:, None]
                other = tl.load(total + (past * HEADS + head) * DK + dim[None, :], mask=channel, other=0.0)
                right = tl.load(k + past * k_stride + head * DK + dim[None, :], mask=channel, other=0.0)
                right = tl.trans(right.to(tl.float32) * tl.exp(reference - other))
                place = square + t[:, None] * TILE + i[None, :]
                tl.store(system + place, tl.dot(left_keys, right, input_precision=PRECISION) * rate[:, None])
                read = tl.dot(left_queries, right, input_precision=PRECISION)
                tl.store(reads + place, read.to(reads.dtype.element_ty))
        for column in range(top, tl.minimum(top + SUB, count)):
            at = first + column
            other = tl.load(total + (at * HEADS + head) * DK + dim, mask=dim < DK, other=0.0)[None, :]
            key = tl.load(k + at * k_stride + head * DK + dim, mask=dim < DK, other=0.0).to(tl.float32)
            below = valid & (t >= column)[:, None]
            decayed = tl.exp(tl.where(below, logs - other, float("-inf"))) * key[None, :]
            place = square + t * TILE + column
            tl.store(system + place, tl.sum(keys * decayed, axis=1) * rate)
            tl.store(reads + place, tl.sum(queries * decayed, axis=1).to(reads.dtype.element_ty))


@triton.jit
def _solve(
    q,
    k,
    v,
    beta,
    total,
    system,
    seen,
    updates,
    queries_in,
    keys_out,
    tile_first,
    tile_rows,
    q_stride,
    k_stride,
    v_stride,
    beta_stride,
    HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    TILE: tl.constexpr,
    LEVELS: tl.constexpr,
    INVERSE: tl.constexpr,
    BLOCK: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    PRECISION: tl.constexpr,
):
    tile, head = tl.program_id(0), tl.program_id(1)
    t = tl.arange(0, TILE)
    count = tl.load(tile_rows + tile)
    row = tl.load(tile_first + tile) + t
    here = t < count
    down, across = t[:, None], t[None, :]
    square = (tile * HEADS + head) * TILE * TILE + down * TILE + across
    lower = tl.load(system + square, mask=(down > across) & here[:, None], other=0.0)
    # Blocks of 1, 2, 4, … rows: the inverse of two neighbours' is theirs, and -T2 L T1 below the first.
    inverse = tl.where(down == across, 1.0, 0.0) - tl.where(down >> 1 == across >> 1, lower, 0.0)
    for level in range(1, LEVELS):
        pair = (down >> (level + 1) == across >> (level + 1)) & (down >> level != across >> level)
        link = tl.dot(tl.where(pair, lower, 0.0), inverse, input_precision=INVERSE)
        inverse -= tl.dot(inverse, link, input_precision=INVERSE)
    rate = tl.load(beta + row * beta_stride + head, mask=here, other=0.0).to(tl.float32)[:, None]
    first = tl.load(tile_first + tile)
    for left in range(0, DK, BLOCK):
        dim = left + tl.arange(0, BLOCK)
        valid = here[:, None] & (dim < DK)[None, :]
        if BY_CHANNEL:
            logs = tl.load(total + (row[:, None] * HEADS + head) * DK + dim[None, :], mask=valid, other=0.0)
            end = tl.load(total + ((first + count - 1) * HEADS + head) * DK + dim, mask=dim < DK, other=0.0)[None, :]
        else:
            logs = tl.load(total + row * HEADS + head, mask=here, other=0.0)[:, None]
            end = tl.load(total + (first + count - 1) * HEADS + head)
        place = (row[:, None] * HEADS + head) * DK + dim[None, :]
        keys = tl.load(k + row[:, None] * k_stride + head * DK + dim[None, :], mask=valid, other=0.0).to(tl.float32)
        part = tl.dot(inverse, keys * tl.exp(logs) * rate, input_precision=PRECISION)
        tl.store(seen + place, part.to(seen.dtype.element_ty), mask=valid)
        # Of rows that are not there, the difference may be positive.
        to_end = tl.exp(tl.where(here[:, None], end - logs, 0.0))
        tl.store(keys_out + place, (keys * to_end).to(keys_out.dtype.element_ty), mask=valid)
        queries = tl.load(q + row[:, None] * q_stride + head * DK + dim[None, :], mask=valid, other=0.0)
        queries = queries.to(tl.float32) * tl.exp(logs)
        tl.store(queries_in + place, queries.to(queries_in.dtype.element_ty), mask=valid)
    for left in range(0, DV, BLOCK):
        dim = left + tl.arange(0, BLOCK)
        valid = here[:, None] & (dim < DV)[None, :]
        values = tl.load(v + row[:, None] * v_stride + head * DV + dim[None, :], mask=valid, other=0.0)
        part = tl.dot(inverse, values.to(tl.float32) * rate, input_precision=PRECISION)
        tl.store(updates + (row[:, None] * HEADS + head) * DV + dim[None, :], part, mask=valid)


@triton.jit
def _walk(
    queries_in,
    keys_out,
    total,
    reads,
    seen,
    updates,
    states,
    out,
    tile_first,
    tile_rows,
    tile_stores,
    sequence_tiles,
    source,
    store_block,
    block_stride,
    HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    PRECISION: tl.constexpr,
):
    sequence, head = tl.program_id(0), tl.program_id(1)
    v = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    dim, t = tl.arange(0, BLOCK_K), tl.arange(0, TILE)
    dtype = keys_out.dtype.element_ty
    inner = head * DK * DV + dim[:, None] * DV + v[None, :]
    held = (dim < DK)[:, None] & (v < DV)[None, :]
    before = states + tl.load(source + sequence).to(tl.int64) * block_stride
    state = tl.load(before + inner, mask=held, other=0.0)
    for tile in range(tl.load(sequence_tiles + sequence), tl.load(sequence_tiles + sequence + 1)):
        first, count = tl.load(tile_first + tile), tl.load(tile_rows + tile)
        row, here = first + t, t < count
        narrow, wide = here[:, None] & (v < DV)[None, :], here[:, None] & (dim < DK)[None, :]
        by_key = (row[:, None] * HEADS + head) * DK + dim[None, :]
        by_value = (row[:, None] * HEADS + head) * DV + v[None, :]
        past = tl.load(seen + by_key, mask=wide, other=0.0)
        update = tl.load(updates + by_value, mask=narrow, other=0.0)
        update -= tl.dot(past, state.to(dtype), input_precision=PRECISION)
        queries = tl.load(queries_in + by_key, mask=wide, other=0.0)
        attended = tl.dot(queries, state.to(dtype), input_precision=PRECISION)
        square = (tile * HEADS + head) * TILE * TILE + t[:, None] * TILE + t[None, :]
        read = tl.load(reads + square, mask=(t[:, None] >= t[None, :]) & here[:, None], other=0.0)
        attended += tl.dot(read, update.to(dtype), input_precision=PRECISION)
        tl.store(out + by_value, attended.to(out.dtype.element_ty), mask=narrow)
        if BY_CHANNEL:
            end = tl.load(total + ((first + count - 1) * HEADS + head) * DK + dim, mask=dim < DK, other=0.0)[:, None]
        else:
            end = tl.load(total + (first + count - 1) * HEADS + head)
        keys = tl.trans(tl.load(keys_out + by_key, mask=wide, other=0.0))
        state = state * tl.exp(end) + tl.dot(keys, update.to(dtype), input_precision=PRECISION)
        store, last = tl.load(tile_stores + tile), tl.load(tile_stores + tile + 1)
        store_states(states, inner, held, state, store_block, store, last, block_stride)


@triton.jit
def _recur(
    q,
    k,
    v,
    g,
    beta,
    states,
    out,
    tile_first,
    tile_rows,
    tile_stores,
    sequence_tiles,
    source,
    store_block,
    q_stride,
    k_stride,
    v_stride,
    g_stride,
    beta_stride,
    block_stride,
    HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
):
    sequence, head = tl.program_id(0), tl.program_id(1)
    v_dim, dim = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V), tl.arange(0, BLOCK_K)
    inner = head * DK * DV + dim[:, None] * DV + v_dim[None, :]
    held = (dim < DK)[:, None] & (v_dim < DV)[None, :]
    before = states + tl.load(source + sequence).to(tl.int64) * block_stride
    state = tl.load(before + inner, mask=held, other=0.0)
    for tile in range(tl.load(sequence_tiles + sequence), tl.load(sequence_tiles + sequence + 1)):
        first = tl.load(tile_first + tile)
        for row in range(first, first + tl.load(tile_rows + tile)):
            if BY_CHANNEL:
                state *= tl.exp(tl.load(g + row * g_stride + head * DK + dim, mask=dim < DK, other=0.0))[:, None]
            else:
                state *= tl.exp(tl.load(g + row * g_stride + head))
            key = tl.load(k + row * k_stride + head * DK + dim, mask=dim < DK, other=0.0).to(tl.float32)
            query = tl.load(q + row * q_stride + head * DK + dim, mask=dim < DK, other=0.0).to(tl.float32)
            value = tl.load(v + row * v_stride + head * DV + v_dim, mask=v_dim < DV, other=0.0).to(tl.float32)
            rate = tl.load(beta + row * beta_stride + head).to(tl.float32)
            update = rate * (value - tl.sum(state * key[:, None], axis=0))
            state += key[:, None] * update[None, :]
            attended = tl.sum(state * query[:, None], axis=0)
            tl.store(out + (row * HEADS + head) * DV + v_dim, attended.to(out.dtype.element_ty), mask=v_dim < DV)
        store, last = tl.load(tile_stores + tile), tl.load(tile_stores + tile + 1)
        store_states(states, inner, held, state, store_block, store, last, block_stride)


def gated_delta(
    plan: ScanPlan,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
) -> torch.Tensor:
    """See :class:`moonpool_worker.kernels.interface.Kernels`. ``g`` must not be positive.

    In half precision, products with the state are of k's dtype, and what is summed is float32; float32 is float32.
    """
    q, k, v, g, beta = (by_rows(part) for part in (q, k, v, g, beta))
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    if plan.decodes is not None:
        by_token(plan.decodes, q, k, v, g, beta, states, out)
    if plan.prompts is not None:
        way = by_token if k.dtype == torch.float32 else by_tile
        way(plan.prompts, q, k, v, g, beta, states, out)
    return out


def by_token(
    part: ScanPart,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """One program per sequence, head and 32 value dimensions, over all rows of ``part``; writes ``out`` [T, H, Dv]."""
    heads, dk, dv = q.shape[1], q.shape[2], v.shape[2]
    block = min(32, triton.next_power_of_2(dv))
    _recur[(part.sequences, heads, triton.cdiv(dv, block))](
        q,
        k,
        v,
        g,
        beta,
        states,
        out,
        part.tile_first,
        part.tile_rows,
        part.tile_stores,
        part.sequence_tiles,
        part.source,
        part.store_block,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        g.stride(0),
        beta.stride(0),
        states.stride(0),
        HEADS=heads,
        DK=dk,
        DV=dv,
        BLOCK_K=triton.next_power_of_2(dk),
        BLOCK_V=block,
        BY_CHANNEL=g.dim() == 3,
    )


def by_tile(
    part: ScanPart,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """64 rows at a time; writes ``out`` [T, H, Dv]."""
    rows, heads, dk = q.shape
    dv = v.shape[2]
    by_channel = g.dim() == 3
    precision = "ieee" if k.dtype == torch.float32 else "tf32"
    block_k = max(16, triton.next_power_of_2(dk))

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=q.device)

    total = empty(rows, heads, dk) if by_channel else empty(rows, heads)
    system = empty(part.tiles, heads, TILE, TILE)
    reads = empty(part.tiles, heads, TILE, TILE, dtype=k.dtype)
    seen, queries_in, keys_out = (empty(rows, heads, dk, dtype=k.dtype) for _ in range(3))
    updates = empty(rows, heads, dv)
    where = (part.tile_first, part.tile_rows)
    sizes: dict[str, int | str] = {"HEADS": heads, "DK": dk, "TILE": TILE}
    if by_channel:
        few = min(32, block_k)
        _totals_by_channel[(part.tiles, heads, triton.cdiv(dk, few))](
            g, total, *where, g.stride(0), **sizes, BLOCK_K=few
        )
        _products_by_channel[(part.tiles, heads, TILE // _SUB)](
            q,
            k,
            beta,
            total,
            system,
            reads,
            *where,
            q.stride(0),
            k.stride(0),
            beta.stride(0),
            **sizes,
            SUB=_SUB,
            BLOCK_K=block_k,
            PRECISION=precision,
        )
    else:
        _products_by_head[(part.tiles, heads)](
            q,
            k,
            g,
            beta,
            total,
            system,
            reads,
            *where,
            q.stride(0),
            k.stride(0),
            g.stride(0),
            beta.stride(0),
            **sizes,
            BLOCK_K=block_k,
            PRECISION=precision,
            num_warps=8,
        )
    sizes |= {"DV": dv, "BY_CHANNEL": by_channel, "PRECISION": precision}
    _solve[(part.tiles, heads)](
        q,
        k,
        v,
        beta,
        total,
        system,
        seen,
        updates,
        queries_in,
        keys_out,
        *where,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        beta.stride(0),
        **sizes,
        LEVELS=TILE.bit_length() - 1,
        # As good as float32 here, and with half the registers of tf32x3; the interpreter does not know it.
        INVERSE="ieee" if triton.knobs.runtime.interpret else "bf16x3",
        BLOCK=min(32, block_k),
        num_warps=8,
        num_stages=1,
    )
    block_v = min(32, max(16, triton.next_power_of_2(dv)))
    _walk[(part.sequences, heads, triton.cdiv(dv, block_v))](
        queries_in,
        keys_out,
        total,
        reads,
        seen,
        updates,
        states,
        out,
        *where,
        part.tile_stores,
        part.sequence_tiles,
        part.source,
        part.store_block,
        states.stride(0),
        **sizes,
        BLOCK_K=block_k,
        BLOCK_V=block_v,
        num_warps=8,
        num_stages=1,
    )
