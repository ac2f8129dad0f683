"""The data type of weights and KV."""

from __future__ import annotations

from pathlib import Path

import torch

_NAMES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def resolve_dtype(name: str) -> torch.dtype:
    """``auto`` is bfloat16 where the CPU multiplies it natively, else float32. Raises ValueError for other names."""
    if name == "auto":
        return torch.bfloat16 if _native_bfloat16() else torch.float32
    if name not in _NAMES:
        raise ValueError(f"there is no data type {name!r}; use auto, float32 or bfloat16")
    return _NAMES[name]


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` or ``bfloat16``, as the namespace has it."""
    return str(dtype).removeprefix("torch.")


def _native_bfloat16() -> bool:
    if torch.cuda.is_available():
        return True
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    # x86: AVX-512 BF16 or AMX; Arm: BF16.
    return any(f" {flag}" in flags for flag in ("avx512_bf16", "amx_bf16", "bf16"))
