"""RMSNorm (Zhang and Sennrich, 2019), alone and fused with the residual sum before it. Computed in float32."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

#: Elements that one program holds.
_TILE = 4096


@triton.jit
def rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    eps,
    rows,
    inner,
    x_outer,
    x_inner,
    HIDDEN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (columns < HIDDEN)[None, :]
    x_at = (row // inner * x_outer + row % inner * x_inner)[:, None] + columns[None, :]
    x = tl.load(x_ptr + x_at, mask=inside, other=0.0).to(tl.float32)
    at = row[:, None] * HIDDEN + columns[None, :]
    if ADD:
        total = tl.load(residual_ptr + at, mask=inside, other=0.0)
        # The norm is that of the sum as it is kept, rounded.
        total = (total.to(tl.float32) + x).to(total.dtype)
        tl.store(residual_ptr + at, total, mask=inside)
        x = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 1) / HIDDEN + eps)
    weight = tl.load(weight_ptr + columns, mask=columns < HIDDEN, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, (x * scale[:, None] * weight[None, :]).to(out_ptr.dtype.element_ty), mask=inside)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``x`` [..., hidden], ``weight`` [hidden] → [..., hidden]. Two dimensions before the last may have any stride."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, None, weight, eps, out)
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of ``residual + x`` and the sum, which overwrites ``residual``; all [T, hidden]."""
    if not residual.is_contiguous():
        residual = residual.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, residual, weight, eps, out)
    return out, residual


def _launch(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, out: torch.Tensor
) -> None:
    hidden = x.shape[-1]
    if x.stride(-1) != 1 or x.dim() > 3:
        x = x.contiguous().view(-1, hidden)
    while x.dim() < 3:
        x = x.unsqueeze(0)
    rows = x.shape[0] * x.shape[1]
    if not rows:
        return
    block = triton.next_power_of_2(hidden)
    block_rows = max(1, min(_TILE // block, triton.next_power_of_2(rows)))
    rms_norm_kernel[(-(-rows // block_rows),)](
        x, residual, weight, out, eps, rows, x.shape[1], x.stride(0), x.stride(1), HIDDEN=hidden,
        BLOCK_ROWS=block_rows, BLOCK=block, ADD=residual is not None,
        num_warps=4 if block * block_rows <= _TILE else 8 if block <= 2 * _TILE else 16,
    )  # fmt: skip
