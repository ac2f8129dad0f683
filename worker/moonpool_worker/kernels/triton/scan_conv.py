"""Depthwise causal convolution: one kernel for the outputs, one for the windows of inputs that are kept."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moonpool_worker.kernels.scans.segments import TILE
from moonpool_worker.kernels.triton.scan_plan import ScanPart, ScanPlan, by_rows


@triton.jit
def _outputs(
    x,
    weight,
    bias,
    states,
    out,
    tile_first,
    tile_rows,
    tile_sequence,
    sequence_first,
    source,
    x_stride,
    block_stride,
    channels,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
):
    tile = tl.program_id(0)
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    here = c < channels
    first = tl.load(tile_first + tile)
    sequence = tl.load(tile_sequence + tile)
    begin = tl.load(sequence_first + sequence)
    before = states + tl.load(source + sequence).to(tl.int64) * block_stride
    row = first + tl.arange(0, ROWS)
    valid = (tl.arange(0, ROWS) < tl.load(tile_rows + tile))[:, None] & here[None, :]
    total = tl.zeros((ROWS, CHANNELS), tl.float32)
    for tap in tl.static_range(WIDTH):
        at = row - (WIDTH - 1 - tap)
        inside = (at >= begin)[:, None]
        fresh = tl.load(x + at[:, None] * x_stride + c[None, :], mask=valid & inside, other=0.0).to(tl.float32)
        kept = tl.load(
            before + c[None, :] * (WIDTH - 1) + (at - begin + WIDTH - 1)[:, None], mask=valid & ~inside, other=0.0
        ).to(tl.float32)
        w = tl.load(weight + c * WIDTH + tap, mask=here, other=0.0).to(tl.float32)
        total += tl.where(inside, fresh, kept) * w[None, :]
    if BIAS:
        total += tl.load(bias + c, mask=here, other=0.0).to(tl.float32)[None, :]
    if SILU:
        total = total / (1.0 + tl.exp(-total))
    tl.store(out + row[:, None] * channels + c[None, :], total.to(out.dtype.element_ty), mask=valid)


@triton.jit
def _windows(
    x,
    states,
    tile_stores,
    sequence_tiles,
    sequence_first,
    source,
    store_block,
    store_end,
    x_stride,
    block_stride,
    channels,
    WIDTH: tl.constexpr,
    PLACES: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    sequence = tl.program_id(0)
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    place = tl.arange(0, PLACES)
    valid = (c < channels)[:, None] & (place < WIDTH - 1)[None, :]
    inner = c[:, None] * (WIDTH - 1) + place[None, :]
    before = states + tl.load(source + sequence).to(tl.int64) * block_stride
    old = tl.load(before + inner, mask=valid, other=0.0)
    # The source may be a target too: nobody may store before all have loaded.
    tl.debug_barrier()
    begin = tl.load(sequence_first + sequence)
    first_store = tl.load(tile_stores + tl.load(sequence_tiles + sequence))
    last_store = tl.load(tile_stores + tl.load(sequence_tiles + sequence + 1))
    for store in range(first_store, last_store):
        end = tl.load(store_end + store)
        at = end - (WIDTH - 1) + place
        inside = (at >= begin)[None, :]
        fresh = tl.load(x + at[None, :] * x_stride + c[:, None], mask=valid & inside, other=0.0)
        # What was at place + (end - begin) of the old window.
        moved = (place[:, None] == place[None, :] + (end - begin))[None, :, :]
        shifted = tl.sum(tl.where(moved, old.to(tl.float32)[:, :, None], 0.0), axis=1)
        window = tl.where(inside, fresh.to(tl.float32), shifted)
        target = states + tl.load(store_block + store).to(tl.int64) * block_stride
        tl.store(target + inner, window.to(states.dtype.element_ty), mask=valid)


def causal_conv(
    plan: ScanPlan,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    *,
    silu: bool = True,
) -> torch.Tensor:
    """See :class:`moonpool_worker.kernels.interface.Kernels`. Sums are float32, from the oldest input on."""
    x = by_rows(x)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if plan.decodes is not None:
        _convolve(plan.decodes, x, weight, bias, states, out, silu, rows=1, channels=256)
    if plan.prompts is not None:
        _convolve(plan.prompts, x, weight, bias, states, out, silu, rows=TILE, channels=32)
    return out


def _convolve(
    part: ScanPart,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    out: torch.Tensor,
    silu: bool,
    rows: int,
    channels: int,
) -> None:
    count, width = weight.shape
    channels = min(channels, triton.next_power_of_2(count))
    blocks = triton.cdiv(count, channels)
    _outputs[(part.tiles, blocks)](
        x,
        weight.contiguous(),
        weight if bias is None else bias,
        states,
        out,
        part.tile_first,
        part.tile_rows,
        part.tile_sequence,
        part.sequence_first,
        part.source,
        x.stride(0),
        states.stride(0),
        count,
        WIDTH=width,
        ROWS=rows,
        CHANNELS=channels,
        BIAS=bias is not None,
        SILU=silu,
    )
    # Behind the first kernel on the stream, which reads the windows that this one may overwrite.
    _windows[(part.sequences, blocks)](
        x,
        states,
        part.tile_stores,
        part.sequence_tiles,
        part.sequence_first,
        part.source,
        part.store_block,
        part.store_end,
        x.stride(0),
        states.stride(0),
        count,
        WIDTH=width,
        PLACES=triton.next_power_of_2(width - 1),
        CHANNELS=channels,
    )
