"""The recurrences of the torch backend, as a mixin."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moonpool_worker.engine.batch import SequenceChunk
from moonpool_worker.kernels.scans.causal_conv import causal_conv
from moonpool_worker.kernels.scans.gated_delta import gated_delta
from moonpool_worker.kernels.scans.mamba2 import mamba2
from moonpool_worker.kernels.scans.segments import StatePlan, plan_states


class TorchScans:
    """The state half of :class:`moonpool_worker.kernels.interface.Kernels`, which says what each of these does."""

    def state_plan(self, chunks: Sequence[SequenceChunk], index: int, device: torch.device) -> StatePlan:
        return plan_states(chunks, index, device)

    causal_conv = staticmethod(causal_conv)
    gated_delta = staticmethod(gated_delta)
    mamba2 = staticmethod(mamba2)
