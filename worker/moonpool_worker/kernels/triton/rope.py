"""Rotary position embedding (Su et al., RoFormer, 2021), halves rotated against each other, in float32."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

#: Elements of both halves that one program holds.
_TILE = 4096


@triton.jit
def rope_kernel(
    x_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    x_row,
    x_head,
    angle_row,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    columns = tl.arange(0, BLOCK)
    inside = (head < HEADS)[:, None] & (columns < HALF)[None, :]
    cos = tl.load(cos_ptr + row * angle_row + columns, mask=columns < HALF, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr + row * angle_row + columns, mask=columns < HALF, other=0.0).to(tl.float32)[None, :]
    x_at = x_ptr + row * x_row + head[:, None] * x_head + columns[None, :]
    first = tl.load(x_at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x_at + HALF, mask=inside, other=0.0).to(tl.float32)
    out_at = out_ptr + (row * HEADS + head[:, None]) * (2 * HALF) + columns[None, :]
    tl.store(out_at, (first * cos - second * sin).to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(out_at + HALF, (second * cos + first * sin).to(out_ptr.dtype.element_ty), mask=inside)


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """``x`` [T, heads, D] of any row and head stride; ``cos``, ``sin`` [T, 1, D / 2]; returns [T, heads, D]."""
    tokens, heads, dim = x.shape
    out = torch.empty((tokens, heads, dim), dtype=x.dtype, device=x.device)
    if x.stride(2) != 1:
        x = x.contiguous()
    cos, sin = cos.contiguous(), sin.contiguous()
    block = triton.next_power_of_2(dim // 2)
    block_heads = min(triton.next_power_of_2(heads), max(1, _TILE // (2 * block)))
    rope_kernel[(tokens, -(-heads // block_heads))](
        x, cos, sin, out, x.stride(0), x.stride(1), cos.stride(0), HEADS=heads, HALF=dim // 2,
        BLOCK_HEADS=block_heads, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return out
