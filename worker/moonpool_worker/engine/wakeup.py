"""How the engine's thread sleeps: on a descriptor, so that requests and the L3 process can both end the sleep."""

from __future__ import annotations

import os
import select


class Wakeup:
    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def set(self) -> None:
        """From any thread."""
        if self._fd >= 0:
            os.eventfd_write(self._fd, 1)

    def wait(self, timeout: float | None, other: int | None = None) -> None:
        """Return after :meth:`set`, when ``other`` can be read, or after ``timeout`` seconds."""
        poller = select.poll()
        poller.register(self._fd, select.POLLIN)
        if other is not None:
            poller.register(other, select.POLLIN)
        poller.poll(None if timeout is None else timeout * 1000)
        try:
            os.eventfd_read(self._fd)
        except BlockingIOError:
            return

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
