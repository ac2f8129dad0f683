"""Open a checkpoint of either format."""

from __future__ import annotations

import os

from moonpool_worker.weights.checkpoint import Checkpoint
from moonpool_worker.weights.resolve import resolve


def open_checkpoint(model: str | os.PathLike[str]) -> Checkpoint:
    """The checkpoint at ``model`` (see :func:`resolve`). Raises ModelLoadError."""
    files = resolve(model)
    if files.format == "gguf":
        from moonpool_worker.weights.gguf_checkpoint import GGUFCheckpoint

        return GGUFCheckpoint(files.path)
    from moonpool_worker.weights.safetensors_checkpoint import SafetensorsCheckpoint

    return SafetensorsCheckpoint(files.path)
