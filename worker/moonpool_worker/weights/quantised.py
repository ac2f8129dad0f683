"""Matrices that stay in the blocks that their file has them in."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class QuantisedMatrix:
    """``kind``: GGUF's name of the format, such as Q4_1. ``parts``: matrices below one another, uint8 [rows, bytes of
    a row], C-contiguous. ``shape``: [rows of all parts, elements of a row]."""

    kind: str
    parts: tuple[np.ndarray, ...]
    shape: tuple[int, int]

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """The values, [rows, columns]."""
        import gguf

        kind = gguf.GGMLQuantizationType[self.kind]
        values = [torch.from_numpy(gguf.quants.dequantize(part, kind)).to(dtype) for part in self.parts]
        return torch.cat(values)
