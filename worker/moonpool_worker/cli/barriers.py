"""How torch's threads wait for each other.

OpenMP's threads spin at the barrier that ends each operator. Where the CPUs are shared that is ruinous: the thread that
spins keeps the one that it waits for from running, and decode falls from 21 tokens a second to 2.4 (measured beside
other busy processes on two cores). On a quiet machine sleeping costs nothing that could be measured.
"""

from __future__ import annotations

import os


def forbid_spinning() -> None:
    """Let OpenMP's threads sleep, unless the environment says otherwise; only before torch is imported."""
    os.environ.setdefault("GOMP_SPINCOUNT", "0")
