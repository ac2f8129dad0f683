"""From what a user names (``smollm2``, ``gemma3``, a file, a folder) to the files that hold the model."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from moonpool_worker.weights.errors import ModelLoadError
from moonpool_worker.weights.packaged import PACKAGED, packaged_smollm2

__all__ = ["ModelFiles", "packaged_smollm2", "resolve"]


@dataclass(frozen=True)
class ModelFiles:
    """``path`` is the GGUF file, or the folder in Hugging Face's layout."""

    format: Literal["gguf", "safetensors"]
    path: Path


def resolve(model: str | os.PathLike[str]) -> ModelFiles:
    """Find a model's files. Raises ModelLoadError when there is no readable model at ``model``."""
    path = Path(model)
    if str(model) in PACKAGED and not path.exists():
        path = PACKAGED[str(model)]()
    if not path.exists():
        raise ModelLoadError(
            f"there is no model at {path}: give a .gguf file or a folder with config.json and safetensors"
        )
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelLoadError(f"{path} is not a model: a single file must be a .gguf")
        return _readable(ModelFiles("gguf", path))
    ggufs = sorted(path.glob("*.gguf"))
    if any(path.glob("*.safetensors")):
        if not (path / "config.json").exists():
            raise ModelLoadError(f"{path} has safetensors but no config.json")
        return _readable(ModelFiles("safetensors", path))
    if len(ggufs) == 1:
        return _readable(ModelFiles("gguf", ggufs[0]))
    if ggufs:
        raise ModelLoadError(f"{path} holds {len(ggufs)} .gguf files: name the one that is meant")
    raise ModelLoadError(f"{path} holds neither a .gguf file nor safetensors")


def _readable(files: ModelFiles) -> ModelFiles:
    if not os.access(files.path, os.R_OK):
        raise ModelLoadError(f"{files.path} cannot be read: its permissions do not let user {os.getuid()} in")
    return files
