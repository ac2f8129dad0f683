"""How many threads may compute: what the container was given, not what the machine has.

More threads than the CPU quota are throttled together: each barrier then waits for the next scheduling period.
"""

from __future__ import annotations

import os
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")


def usable_cpus(root: Path = _ROOT) -> int:
    """Whole CPUs of the smaller of affinity and the cgroup's quota (v2 or v1); at least 1."""
    cpus = len(os.sched_getaffinity(0))
    quota = _quota_v2(root) or _quota_v1(root)
    return max(1, min(cpus, int(quota)) if quota else cpus)


def _quota_v2(root: Path) -> float | None:
    try:
        quota, period = (root / "cpu.max").read_text().split()
    except (OSError, ValueError):
        return None
    return None if quota == "max" else int(quota) / int(period)


def _quota_v1(root: Path) -> float | None:
    try:
        quota = int((root / "cpu" / "cpu.cfs_quota_us").read_text())
        period = int((root / "cpu" / "cpu.cfs_period_us").read_text())
    except (OSError, ValueError):
        return None
    return quota / period if quota > 0 else None
