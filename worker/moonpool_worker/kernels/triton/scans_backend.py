"""The recurrences of the Triton backend, as a mixin."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moonpool_worker.engine.batch import SequenceChunk
from moonpool_worker.kernels.triton.scan_conv import causal_conv
from moonpool_worker.kernels.triton.scan_gated_delta import gated_delta
from moonpool_worker.kernels.triton.scan_mamba2 import mamba2
from moonpool_worker.kernels.triton.scan_plan import ScanPlan, plan_scans


class TritonScans:
    """The state half of :class:`moonpool_worker.kernels.interface.Kernels`, which says what each of these does."""

    def state_plan(self, chunks: Sequence[SequenceChunk], index: int, device: torch.device) -> ScanPlan:
        return plan_scans(chunks, index, device)

    causal_conv = staticmethod(causal_conv)
    gated_delta = staticmethod(gated_delta)
    mamba2 = staticmethod(mamba2)
