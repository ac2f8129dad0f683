"""Joins the partial results of a tile that was attended in several pieces.

Each piece has a normalised result and the base-2 logarithm of its softmax sum. They are added in the order of their
positions, whatever order they were computed in: the same step gives the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from moonpool_worker.kernels.triton.step_plan import REDUCTION_FIELDS, Work

#: Partial results that are read at once: pieces times elements.
_AT_ONCE = 2048


@dataclass(frozen=True, slots=True)
class Partials:
    """``values`` float32 [slots, lanes, rows, D]; ``weights`` float32 [slots, lanes, rows], log2 of the softmax sum."""

    values: torch.Tensor
    weights: torch.Tensor

    @classmethod
    def empty(cls, slots: int, lanes: int, rows: int, dim: int, device: torch.device) -> Partials:
        shape = (max(slots, 1), lanes, rows) if slots else (1, 1, 1)
        values = torch.empty((*shape, dim), dtype=torch.float32, device=device)
        return cls(values, torch.empty(shape, dtype=torch.float32, device=device))


@triton.jit
def split_reduction_kernel(
    partial_ptr,
    weight_ptr,
    sinks_ptr,
    out_ptr,
    reduction_ptr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SLICE: tl.constexpr,
    SLICES: tl.constexpr,
    QUERIES: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PIECES: tl.constexpr,
    FIELDS: tl.constexpr,
    SINKS: tl.constexpr,
):
    heads: tl.constexpr = KV_HEADS * GROUP
    head = tl.program_id(0) % heads
    query = (tl.program_id(0) // heads) % QUERIES
    reduction = reduction_ptr + (tl.program_id(0) // (heads * QUERIES)) * FIELDS
    if query < tl.load(reduction + 1):
        step_row = tl.load(reduction).to(tl.int64) + query
        first_slot = tl.load(reduction + 2).to(tl.int64)
        slots = tl.load(reduction + 3)
        in_group = head % GROUP
        lane = (head // GROUP) * SLICES + in_group // SLICE
        m = query * SLICE + in_group % SLICE
        columns = tl.arange(0, BLOCK_D)
        acc = tl.zeros((BLOCK_D,), tl.float32)
        if SINKS:
            top = tl.load(sinks_ptr + head).to(tl.float32) * 1.4426950408889634
            total = 1.0
        else:
            top = tl.full((), float("-inf"), tl.float32)
            total = 0.0
        for start in range(0, slots, PIECES):
            number = start + tl.arange(0, PIECES)
            at = ((first_slot + number) * (KV_HEADS * SLICES) + lane) * BLOCK_M + m
            there = number < slots
            weight = tl.load(weight_ptr + at, mask=there, other=float("-inf"))
            inside = there[:, None] & (columns < DIM)[None, :]
            value = tl.load(partial_ptr + at[:, None] * DIM + columns[None, :], mask=inside, other=0.0)
            new_top = tl.maximum(top, tl.max(weight, 0))
            base = tl.where(new_top == float("-inf"), 0.0, new_top)
            share = tl.exp2(weight - base)
            fade = tl.exp2(top - base)
            acc = acc * fade + tl.sum(share[:, None] * value, 0)
            total = total * fade + tl.sum(share, 0)
            top = new_top
        out_at = (step_row * heads + head) * DIM + columns
        tl.store(out_ptr + out_at, (acc / total).to(out_ptr.dtype.element_ty), mask=columns < DIM)


def reduce_splits(
    work: Work,
    partials: Partials,
    out: torch.Tensor,
    sinks: torch.Tensor | None,
    kv_heads: int,
    slice_heads: int,
    slices: int,
    queries: int,
) -> None:
    """Writes the rows of ``out`` [T, H, D] whose tiles had several pieces. A tile holds ``queries`` tokens times
    ``slice_heads`` heads; ``slices`` such tiles make up a KV head's group."""
    tiles = work.reductions.shape[0]
    if not tiles:
        return
    _, heads, dim = out.shape
    block_d = triton.next_power_of_2(dim)
    split_reduction_kernel[(tiles * queries * heads,)](
        partials.values, partials.weights, sinks, out, work.reductions,
        KV_HEADS=kv_heads, GROUP=heads // kv_heads, SLICE=slice_heads, SLICES=slices, QUERIES=queries, DIM=dim,
        BLOCK_D=block_d, BLOCK_M=partials.values.shape[2], PIECES=max(4, _AT_ONCE // block_d),
        FIELDS=REDUCTION_FIELDS, SINKS=sinks is not None, num_warps=4,
    )  # fmt: skip
