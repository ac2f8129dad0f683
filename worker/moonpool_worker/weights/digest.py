"""The weights digest: what was loaded, as one SHA-256.

For a single file it is the digest of its bytes, so that ``sha256sum`` confirms it. For a folder it is the digest of one
line per file that was read, ``<sha256>  <name>`` and a newline, sorted by name: what ``sha256sum`` prints.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from pathlib import Path

from moonpool_worker.weights.errors import ModelLoadError


class PinnedFile:
    """An open file whose content must not change while it is used.

    Everything reads through the same descriptor (``path_of_descriptor``), so a file that is replaced by another one
    is of no consequence; one that is overwritten in place is noticed by :meth:`check_unchanged`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = path.open("rb")
        except OSError as fault:
            raise ModelLoadError(f"{path} cannot be read: {fault.strerror}") from fault
        self._state = self._stat()

    @property
    def path_of_descriptor(self) -> str:
        return f"/proc/self/fd/{self._file.fileno()}"

    @property
    def size(self) -> int:
        return self._state[0]

    def map(self) -> mmap.mmap:
        """The content, read-only. Raises ModelLoadError for an empty file."""
        try:
            return mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as fault:
            raise ModelLoadError(f"{self.path} cannot be read: {fault}") from fault

    def sha256(self) -> str:
        """64 hex digits over the whole content."""
        self._file.seek(0)
        return hashlib.file_digest(self._file, "sha256").hexdigest()

    def check_unchanged(self) -> None:
        if self._stat() != self._state:
            raise ModelLoadError(
                f"{self.path} was written while it was loaded: load it again when the copy is complete"
            )

    def close(self) -> None:
        self._file.close()

    def _stat(self) -> tuple[int, int, int, int]:
        stat = os.fstat(self._file.fileno())
        return stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino


def digest_of(files: list[tuple[str, PinnedFile]], single: bool) -> str:
    """``sha256:<64 hex>`` of one file, or of the named files of a folder."""
    if single:
        return f"sha256:{files[0][1].sha256()}"
    lines = sorted(f"{file.sha256()}  {name}\n" for name, file in files)
    lines.sort(key=lambda line: line.split("  ", 1)[1])
    return "sha256:" + hashlib.sha256("".join(lines).encode()).hexdigest()
