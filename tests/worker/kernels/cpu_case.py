"""The C++ kernels, or a skip with the reason why they are not here."""

from __future__ import annotations

import pytest
from moonpool_worker.kernels.cpu.backend import CpuKernels
from moonpool_worker.kernels.cpu.library import Unavailable


def cpu_kernels(int8: bool = False) -> CpuKernels:
    try:
        return CpuKernels(int8)
    except Unavailable as reason:
        pytest.skip(str(reason))
