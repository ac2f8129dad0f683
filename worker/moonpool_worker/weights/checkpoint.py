"""A checkpoint: configuration, tokenizer and tensors under Hugging Face's names, whatever the file format."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np
import torch

from moonpool_worker.models.config import ModelConfig
from moonpool_worker.tokenizer.tokenizer import Tokenizer


class Checkpoint(Protocol):
    config: ModelConfig

    def tokenizer(self) -> Tokenizer: ...

    def names(self) -> list[str]:
        """Names of all tensors, in Hugging Face's terms."""
        ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def rows(self, name: str) -> Iterator[tuple[int, torch.Tensor]]:
        """``(first row, float tensor of some rows)`` in order: a large tensor never stands twice in memory."""
        ...

    def blocks(self, name: str) -> tuple[str, np.ndarray] | None:
        """A matrix that is stored in quantised blocks, as it is: GGUF's name of the format, and uint8 [rows, bytes of
        a row]. None for other tensors."""
        ...

    def size(self, name: str) -> int:
        """Bytes in the file, for progress."""
        ...

    def digest(self) -> str:
        """``sha256:…`` of what this checkpoint reads. Raises ModelLoadError when it changed since it was opened."""
        ...

    def close(self) -> None: ...
