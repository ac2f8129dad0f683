"""MXFP4 (OCP Microscaling Formats, 2023), in which gpt-oss stores its experts: 32 numbers of four bits and a scale."""

from __future__ import annotations

import torch

#: Numbers that share a scale, two in a byte.
BLOCK = 32
#: E2M1: sign, two bits of exponent, one of mantissa.
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = torch.tensor([*_POSITIVE, *(-value for value in _POSITIVE)])
_BIAS = 127


def unpack_mxfp4(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``blocks`` uint8 [rows, width / 32, 16], the earlier number of a pair in the low bits; ``scales`` uint8
    [rows, width / 32], exponents of two. Returns [rows, width]."""
    pairs = torch.stack([blocks & 15, blocks >> 4], dim=-1)
    values = _VALUES.to(blocks.device)[pairs.long()].flatten(-2)
    scaled = torch.ldexp(values, (scales.int() - _BIAS).unsqueeze(-1))
    return scaled.to(dtype).flatten(-2)
