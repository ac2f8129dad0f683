"""The container's memory limit, and whether what was asked for fits under it."""

from __future__ import annotations

from pathlib import Path

from moonpool_api.quantity import format_bytes

from moonpool_worker.settings import SettingsError

#: What the process needs besides weights and tiers: Python, torch, activations, tokenizer, the L3 client.
OVERHEAD = 700 * 10**6
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


def check(limit: int | None, weights: int, l1: int, l2: int) -> None:
    """Raises SettingsError with the sum when it is more than ``limit``. Bytes."""
    total = weights + l1 + l2 + OVERHEAD
    if limit is None or total <= limit:
        return
    parts = f"{format_bytes(weights)} weights + " if weights else ""
    raise SettingsError(
        f"the memory limit of this container is {format_bytes(limit)}, but {parts}{format_bytes(l1)} L1 + "
        f"{format_bytes(l2)} L2 + {format_bytes(OVERHEAD)} overhead = {format_bytes(total)}: "
        "raise the limit, or make --l1-size or --l2-size smaller"
    )


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
