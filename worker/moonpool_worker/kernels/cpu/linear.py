"""Products with packed weights."""

from __future__ import annotations

import ctypes

import torch

from moonpool_worker.kernels.cpu.packed import PackedMatrix


class CpuLinear:
    """``x`` bfloat16 [T, in] → [T, out]."""

    def __init__(self, lib: ctypes.CDLL, matrix: PackedMatrix) -> None:
        self.matrix = matrix
        self._call, self._reference = lib.mp_linear, ctypes.byref(matrix.structure)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.stride(-1) != 1 or x.dim() != 2:
            x = x.reshape(-1, x.shape[-1]).contiguous()
        y = torch.empty(x.shape[0], self.matrix.rows, dtype=torch.bfloat16)
        self._call(self._reference, x.data_ptr(), x.stride(0), x.shape[0], y.data_ptr())
        return y
