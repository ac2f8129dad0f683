"""L2's memory: a memfd, which another process can map, touched ahead of its use.

A memfd counts to the pod's cgroup, needs no ``/dev/shm``, goes to a child by descriptor, and outlives the process when
another holds it. Its pages are zeroed by the kernel when they are first touched, which costs several times a copy; a
thread touches them ahead of those who write.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading

import torch

#: MADV_POPULATE_WRITE, Linux 5.14: touch pages without changing what they hold.
_POPULATE_WRITE = 23
#: Touched in one call, and how far ahead of the highest byte in use.
_STRIDE = 4 << 20
_AHEAD = 128 << 20


class HostMemory:
    """``size`` bytes behind ``fd``: a new memfd, or one that is given (it is made this large, and kept as it is)."""

    def __init__(self, size: int, fd: int | None = None) -> None:
        self.nbytes = size
        self.fd = os.memfd_create("moonpool-l2", os.MFD_CLOEXEC) if fd is None else os.dup(fd)
        #: Bytes that were there before; what is behind them is zeros.
        self.found = min(os.fstat(self.fd).st_size, size)
        os.ftruncate(self.fd, size)
        self._map = mmap.mmap(self.fd, size)
        self.bytes = memoryview(self._map)
        #: The same bytes, uint8 [size].
        self.flat = torch.frombuffer(self._map, dtype=torch.uint8)
        self._address = self.flat.data_ptr()
        self._wanted = 0
        self._wakeup = threading.Condition()
        self._closing = False
        self._toucher: threading.Thread | None = None

    def will_use(self, offset: int) -> None:
        """Somebody is about to write near ``offset``: touch what comes behind it, on another thread."""
        wanted = min(offset + _AHEAD, self.nbytes)
        if wanted <= self._wanted:
            return
        with self._wakeup:
            self._wanted = wanted
            if self._toucher is None:
                self._toucher = threading.Thread(target=self._touch, name="l2-touch", daemon=True)
                self._toucher.start()
            self._wakeup.notify()

    def close(self) -> None:
        """Give the memory back. Nobody else may use it any more."""
        with self._wakeup:
            self._closing = True
            self._wakeup.notify()
        if self._toucher is not None:
            self._toucher.join()
        del self.flat
        os.close(self.fd)
        self.bytes.release()
        try:
            self._map.close()
        except BufferError:
            # A tensor still looks at it (a traceback, a debugger): the pages go when that does.
            return

    def _touch(self) -> None:
        madvise = ctypes.CDLL(None, use_errno=True).madvise
        madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        at = 0
        while True:
            with self._wakeup:
                while not self._closing and self._wanted <= at:
                    self._wakeup.wait()
                if self._closing:
                    return
                length = min(_STRIDE, self._wanted - at)
            # ctypes lets go of the GIL. An older kernel refuses: pages are then touched by those who write.
            if madvise(self._address + at, length, _POPULATE_WRITE) != 0:
                return
            at += length
