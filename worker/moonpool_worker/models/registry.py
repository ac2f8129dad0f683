"""Architecture to model class, and the one call that loads a model."""

from __future__ import annotations

import torch

from moonpool_worker.kernels.interface import Kernels
from moonpool_worker.models.config import ModelConfig
from moonpool_worker.models.dtype import resolve_dtype
from moonpool_worker.models.llama import LlamaModel, Progress
from moonpool_worker.weights.checkpoint import Checkpoint

_FAMILIES = {"llama": LlamaModel}


def build(config: ModelConfig, dtype: torch.dtype, kernels: Kernels) -> LlamaModel:
    return _FAMILIES[config.architecture](config, dtype, kernels)


def load_model(checkpoint: Checkpoint, dtype: str, kernels: Kernels, progress: Progress | None = None) -> LlamaModel:
    """The checkpoint's model, loaded. ``dtype``: auto, float32 or bfloat16. Raises ModelLoadError."""
    model = build(checkpoint.config, resolve_dtype(dtype), kernels)
    model.load(checkpoint, progress)
    return model
