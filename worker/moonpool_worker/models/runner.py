"""The model runner: one forward pass per step, over the paged arena."""

from __future__ import annotations

import torch

from moonpool_worker.cache.device_arena import DeviceArena
from moonpool_worker.engine.batch import StepBatch
from moonpool_worker.models.family import Model


class ModelRunner:
    """Binds a loaded model to the arena that holds its cache."""

    def __init__(self, model: Model, arena: DeviceArena) -> None:
        self.model, self.arena = model, arena
        self.geometry = arena.geometry

    @torch.inference_mode()
    def forward(self, batch: StepBatch) -> torch.Tensor:
        """float32 logits [chunks that want them, vocab], in batch order; this step's KV is in the arena afterwards."""
        return self.model.forward(batch, self.arena)
