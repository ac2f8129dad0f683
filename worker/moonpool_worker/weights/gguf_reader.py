"""Read a GGUF file's metadata and find its tensors.

Format: ggml's GGUF specification, versions 2 and 3, little-endian. The ``gguf`` package's reader makes an array of each
string, which takes seconds for a vocabulary; this one makes strings.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from typing import Any

import gguf
import numpy as np

MAGIC = b"GGUF"
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_PLAIN: dict[gguf.GGMLQuantizationType, np.dtype[Any]] = {
    gguf.GGMLQuantizationType.F32: np.dtype("<f4"),
    gguf.GGMLQuantizationType.F16: np.dtype("<f2"),
}


class GGUFError(ValueError):
    """The bytes are not a complete GGUF file; the message says what is wrong."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """``shape`` in torch's order, slowest dimension first; ``offset`` from the beginning of the file, in bytes."""

    shape: tuple[int, ...]
    kind: gguf.GGMLQuantizationType
    offset: int
    nbytes: int


def is_quantised(kind: gguf.GGMLQuantizationType) -> bool:
    """Whether elements of this type are stored in blocks of several."""
    return gguf.GGML_QUANT_SIZES[kind][0] > 1


class GGUFReader:
    """``fields``: metadata by key; ``tensors``: by ggml's names. Raises GGUFError."""

    def __init__(self, mapped: mmap.mmap) -> None:
        self._mapped, self._at = mapped, 0
        try:
            self._parse()
        except (struct.error, UnicodeDecodeError, KeyError, OverflowError, MemoryError) as fault:
            raise GGUFError(f"its header ends or breaks at byte {self._at}") from fault

    def dequantised(self, tensor: TensorInfo, first: int = 0, count: int | None = None) -> np.ndarray:
        """Rows ``first`` to ``first + count`` as float32: [count, width], or [width] for a vector."""
        rows = math.prod(tensor.shape[:-1])
        row_bytes = tensor.nbytes // rows
        count = rows if count is None else min(count, rows - first)
        raw = np.frombuffer(self._mapped, np.uint8, count * row_bytes, tensor.offset + first * row_bytes)
        plain = _PLAIN.get(tensor.kind)
        if plain is not None:
            values = raw.view(plain).astype(np.float32)
        else:
            values = gguf.quants.dequantize(raw.reshape(count, row_bytes), tensor.kind)
        shape = (count, tensor.shape[-1]) if len(tensor.shape) > 1 else tensor.shape
        return values.reshape(shape)

    def raw(self, tensor: TensorInfo) -> np.ndarray:
        """The bytes of a matrix: uint8 [rows, bytes of a row], a view of the file."""
        return np.frombuffer(self._mapped, np.uint8, tensor.nbytes, tensor.offset).reshape(tensor.shape[0], -1)

    def _parse(self) -> None:
        if self._mapped[:4] != MAGIC:
            raise GGUFError("it does not begin with GGUF")
        self._at = 4
        version = self._scalar("I")
        if version not in (2, 3):
            raise GGUFError(f"its version is {version}; 2 and 3 are known")
        tensors, fields = self._scalar("Q"), self._scalar("Q")
        self.fields: dict[str, Any] = {}
        for _ in range(fields):
            key = self._string()
            self.fields[key] = self._value(self._scalar("I"))
        found = [self._tensor() for _ in range(tensors)]
        alignment = self.fields.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0:
            raise GGUFError(f"its alignment is {alignment!r}")
        begin = -(-self._at // alignment) * alignment
        self.tensors: dict[str, TensorInfo] = {}
        for name, shape, kind, offset in found:
            per_block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
            if not shape or 0 in shape or shape[-1] % per_block:
                raise GGUFError(f"tensor {name} of shape {shape} cannot be of type {kind.name}")
            nbytes = math.prod(shape) // per_block * block_bytes
            end = begin + offset + nbytes
            if end > len(self._mapped):
                raise GGUFError(f"tensor {name} ends at byte {end}, the file at {len(self._mapped)}")
            self.tensors[name] = TensorInfo(shape, kind, begin + offset, nbytes)

    def _tensor(self) -> tuple[str, tuple[int, ...], gguf.GGMLQuantizationType, int]:
        name = self._string()
        dimensions = self._scalar("I")
        # GGUF lists the fastest dimension first.
        shape = tuple(self._scalar("Q") for _ in range(dimensions))[::-1]
        kind = self._scalar("I")
        if kind not in iter(gguf.GGMLQuantizationType):
            raise GGUFError(f"tensor {name} has the unknown type {kind}")
        return name, shape, gguf.GGMLQuantizationType(kind), self._scalar("Q")

    def _scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self._mapped, self._at)
        self._at += struct.calcsize("<" + code)
        return value

    def _string(self) -> str:
        size = self._scalar("Q")
        begin, self._at = self._at, self._at + size
        if self._at > len(self._mapped):
            raise GGUFError(f"its header ends at byte {len(self._mapped)}, within a text")
        return self._mapped[begin : self._at].decode()

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._scalar(_SCALARS[kind])
        inner, count = self._scalar("I"), self._scalar("Q")
        if inner == _STRING:
            return [self._string() for _ in range(count)]
        code = f"<{count}{_SCALARS[inner]}"
        values = list(struct.unpack_from(code, self._mapped, self._at))
        self._at += struct.calcsize(code)
        return values
