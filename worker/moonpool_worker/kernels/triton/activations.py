"""Gated activations: one half of a row through a nonlinearity, times the other half. Computed in float32."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 1024


@triton.jit
def gated_kernel(x_ptr, out_ptr, x_row, WIDTH: tl.constexpr, BLOCK: tl.constexpr, GELU: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    gate = tl.load(x_ptr + row * x_row + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * x_row + WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
    if GELU:
        # tanh(y) / 2 + 1 / 2 is sigmoid(2 y): GELU's tanh approximation (Hendrycks and Gimpel, 2016).
        gated = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    else:
        gated = gate * tl.sigmoid(gate)
    tl.store(out_ptr + row * WIDTH + columns, (gated * up).to(out_ptr.dtype.element_ty), mask=inside)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """[T, 2 * ffn] (gate, up) → silu(gate) * up, [T, ffn]."""
    return _gated(gate_up, gelu=False)


def gelu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """[T, 2 * ffn] (gate, up) → gelu(gate) * up, [T, ffn]; GELU in its tanh approximation."""
    return _gated(gate_up, gelu=True)


def _gated(gate_up: torch.Tensor, gelu: bool) -> torch.Tensor:
    width = gate_up.shape[-1] // 2
    rows = gate_up.reshape(-1, 2 * width)
    out = torch.empty((*gate_up.shape[:-1], width), dtype=gate_up.dtype, device=gate_up.device)
    if not rows.shape[0]:
        return out
    block = min(_BLOCK, triton.next_power_of_2(width))
    gated_kernel[(rows.shape[0], -(-width // block))](
        rows, out, rows.stride(0), WIDTH=width, BLOCK=block, GELU=gelu, num_warps=4
    )
    return out
