"""Memory for weights, in huge pages where the kernel grants them: a decode reads all of it, page after page."""

from __future__ import annotations

import contextlib
import ctypes
import mmap

_REGION = 64 << 20
_LINE = 64


class WeightMemory:
    """Zeroed memory, aligned to cache lines, that lives as long as this object."""

    def __init__(self) -> None:
        self._regions: list[mmap.mmap] = []
        self._at = self._end = 0
        self.used = 0

    def take(self, nbytes: int) -> int:
        """The address of ``nbytes`` bytes."""
        nbytes = -(-nbytes // _LINE) * _LINE
        if self._at + nbytes > self._end:
            self._grow(nbytes)
        address, self._at = self._at, self._at + nbytes
        self.used += nbytes
        return address

    def _grow(self, nbytes: int) -> None:
        region = mmap.mmap(-1, max(_REGION, nbytes))
        with contextlib.suppress(OSError):
            region.madvise(mmap.MADV_HUGEPAGE)
        self._regions.append(region)
        self._at = ctypes.addressof(ctypes.c_char.from_buffer(region))
        self._end = self._at + len(region)
