"""The container's memory limit, and whether what was asked for fits under it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from moonpool_api.quantity import format_bytes

from moonpool_worker.settings import SettingsError

#: What the processes need besides weights and tiers: Python, torch, activations, tokenizer, L3 client, supervisor.
OVERHEAD = 700 * 10**6
DEFAULT_RATIO = 1.0
#: 8 bytes for each page of 4,096.
_PAGES_PER_TABLE_BYTE = 512
_ROOT = Path("/sys/fs/cgroup")
#: cgroup v1 says "no limit" with a number near 2^63.
_UNLIMITED = 1 << 60


def container_limit(root: Path = _ROOT, own: Path = Path("/proc/self/cgroup")) -> int | None:
    """Bytes of the tightest memory limit of this process's cgroups, v1 or v2; None when there is none."""
    limits = []
    for folder, file in _candidates(root, own):
        while True:
            limit = _read(folder / file)
            if limit is not None:
                limits.append(limit)
            if folder == root or root not in folder.parents:
                break
            folder = folder.parent
    return min(limits, default=None)


@dataclass(frozen=True, slots=True)
class HostMemory:
    """What a worker needs of its container's memory, in bytes. With a device, weights and L1 are the device's: 0."""

    weights: int
    l1: int
    l2: int

    @property
    def page_tables(self) -> int:
        """Every process that maps memory pays for its page tables: L1 has one, L2 the engine and the L3 client."""
        return (self.l1 + 2 * self.l2) // _PAGES_PER_TABLE_BYTE

    @property
    def total(self) -> int:
        return self.weights + self.l1 + self.l2 + self.page_tables + OVERHEAD

    def check(self, limit: int | None) -> None:
        """Raises SettingsError with the sum, and the largest L2 that fits, when it is more than ``limit`` bytes."""
        if limit is None or self.total <= limit:
            return
        parts = [(self.weights, "weights"), (self.l1, "L1"), (self.l2, "L2"), (self.page_tables, "page tables")]
        terms = [f"{format_bytes(size)} {name}" for size, name in [*parts, (OVERHEAD, "overhead")] if size]
        room = limit - dataclasses.replace(self, l2=0).total
        largest = room * _PAGES_PER_TABLE_BYTE // (_PAGES_PER_TABLE_BYTE + 2) >> 20
        remedy = f"lower --l2-size to {largest}Mi" if self.l2 and largest > 0 else "make --l1-size or --l2-size smaller"
        raise SettingsError(
            f"the memory limit of this container is {format_bytes(limit)}, but {' + '.join(terms)} = "
            f"{format_bytes(self.total)}: raise the limit, or {remedy}"
        )


def l2_bytes(size: int | None, ratio: float | None, l1: int) -> int:
    """Bytes of L2: ``size`` if given, else ``ratio`` times L1, else as large as L1."""
    if size is not None:
        return size
    return int(l1 * (DEFAULT_RATIO if ratio is None else ratio))


def _candidates(root: Path, own: Path) -> list[tuple[Path, str]]:
    try:
        lines = own.read_text().splitlines()
    except OSError:
        lines = []
    found = [(root, "memory.max"), (root / "memory", "memory.limit_in_bytes")]
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            found.append((root / path.lstrip("/"), "memory.max"))
        elif "memory" in controllers.split(","):
            found.append((root / "memory" / path.lstrip("/"), "memory.limit_in_bytes"))
    return found


def _read(file: Path) -> int | None:
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() and int(text) < _UNLIMITED else None
