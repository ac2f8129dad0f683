"""How torch's threads wait for each other.

OpenMP's threads spin at the barrier that ends each operator. Where the CPUs are shared that is ruinous: the thread that
spins keeps the one that it waits for from running, and a step of 20 ms takes 400 (measured with one other busy
process on two cores). Sleeping costs about a fifth of the decode speed on an idle machine.
"""

from __future__ import annotations

import os

_SPINS = "20000"


def limit_spinning(dedicated_cpus: bool) -> None:
    """Set OpenMP's spinning for this process, unless the environment has; only before torch is imported."""
    os.environ.setdefault("GOMP_SPINCOUNT", _SPINS if dedicated_cpus else "0")
