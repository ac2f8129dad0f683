"""What launches of different kernels have in common."""

from __future__ import annotations

from typing import NamedTuple

import triton
from triton.runtime.driver import driver


class TileShape(NamedTuple):
    """Rows and positions of a tile of attention, and how its kernel is compiled.

    ``registers``: most per thread. Left to itself ptxas sometimes spills a few to fit one more block of threads.
    """

    block_m: int
    block_n: int
    warps: int
    stages: int
    registers: int | None = None


def architecture() -> int:
    """The compute capability that kernels are compiled for now, 90 for 9.0; that of Hopper in the interpreter."""
    return 90 if triton.knobs.runtime.interpret else int(driver.active.get_current_target().arch)
