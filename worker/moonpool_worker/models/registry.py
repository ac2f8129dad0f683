"""Architecture to model class, and the one call that loads a model."""

from __future__ import annotations

import torch

from moonpool_worker.kernels.interface import Kernels
from moonpool_worker.models.dtype import resolve_dtype
from moonpool_worker.models.llama import LlamaModel, tensor_shapes
from moonpool_worker.weights.checkpoint import Checkpoint
from moonpool_worker.weights.tensor_reader import Progress, TensorReader

_FAMILIES = {"llama": (LlamaModel, tensor_shapes)}


@torch.inference_mode()
def load_model(checkpoint: Checkpoint, dtype: str, kernels: Kernels, progress: Progress | None = None) -> LlamaModel:
    """The checkpoint's model with its weights in memory.

    ``dtype``: auto, float32 or bfloat16. ``progress(done, total)`` counts the checkpoint's bytes. Raises
    ModelLoadError.
    """
    config = checkpoint.config
    family, shapes = _FAMILIES[config.architecture]
    with TensorReader(checkpoint, shapes(config), resolve_dtype(dtype), progress) as reader:
        return family(config, reader, kernels)
