"""Keep glibc's allocator from holding on to memory: the container's limit counts every page."""

from __future__ import annotations

import contextlib
import ctypes
import gc

_M_MMAP_THRESHOLD = -3
_M_TRIM_THRESHOLD = -1
_M_ARENA_MAX = -8


def restrain() -> None:
    """Two arenas at most, and freed memory back to the kernel once it is worth it. Before any thread is started."""
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_ARENA_MAX, 2)
        libc.mallopt(_M_MMAP_THRESHOLD, 32 << 20)
        libc.mallopt(_M_TRIM_THRESHOLD, 64 << 20)


def give_back() -> None:
    """What loading left behind goes back to the kernel."""
    gc.collect()
    gc.freeze()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
