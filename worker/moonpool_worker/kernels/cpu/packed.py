"""Weights in the layout that the C++ products read."""

from __future__ import annotations

import ctypes
from enum import IntEnum

import torch

from moonpool_worker.kernels.cpu import structures
from moonpool_worker.kernels.cpu.memory import WeightMemory
from moonpool_worker.weights.quantised import QuantisedMatrix

BLOCK, PANEL = 32, 16


class Kind(IntEnum):
    """How a weight is held: 4-bit codes with scale and offset, 8-bit codes with a scale, or bfloat16."""

    NIBBLE = 0
    BYTE = 1
    PLAIN = 2


class Source(IntEnum):
    Q4_0 = 0
    Q4_1 = 1
    Q8_0 = 2
    BF16 = 3
    F32 = 4


#: GGUF's block formats that are multiplied as they are.
KEPT = {"Q4_0": Kind.NIBBLE, "Q4_1": Kind.NIBBLE, "Q8_0": Kind.BYTE}
_DENSE = {torch.bfloat16: Source.BF16, torch.float32: Source.F32}


def can_pack(weight: torch.Tensor | QuantisedMatrix) -> bool:
    if weight.shape[1] % BLOCK:
        return False
    if isinstance(weight, QuantisedMatrix):
        return weight.kind in KEPT
    return weight.device.type == "cpu" and weight.dtype in _DENSE


class PackedMatrix:
    """A weight [out, in]. ``bias`` [out]. ``nbytes``: of the packed form."""

    def __init__(
        self,
        lib: ctypes.CDLL,
        memory: WeightMemory,
        weight: torch.Tensor | QuantisedMatrix,
        bias: torch.Tensor | None,
        kind: Kind,
    ) -> None:
        self.rows, self.columns = weight.shape
        self.kind = kind
        self.nbytes = lib.mp_packed_bytes(kind, self.rows, self.columns)
        self._memory = memory
        self._bias = None if bias is None else bias.float().contiguous()
        address = memory.take(self.nbytes)
        panels = -(-self.rows // (2 * PANEL)) * 2
        self.structure = structures.Weights(
            kind, self.rows, self.columns, panels, address, None if self._bias is None else self._bias.data_ptr()
        )
        first = 0
        for source, pointer, rows, _keep in _parts(weight):
            if not lib.mp_pack(source, pointer, kind, address, first, rows, self.columns):
                raise ValueError(f"weights of format {source.name} cannot be packed as {kind.name}")
            first += rows


def _parts(weight: torch.Tensor | QuantisedMatrix) -> list[tuple[Source, int, int, object]]:
    if isinstance(weight, QuantisedMatrix):
        source = Source[weight.kind]
        return [(source, part.ctypes.data, part.shape[0], part) for part in weight.parts]
    dense = weight.contiguous()
    return [(_DENSE[dense.dtype], dense.data_ptr(), dense.shape[0], dense)]
