"""Compile Triton kernels for GPUs that are not here, and read what they take.

    python -m moonpool_worker.kernels.triton.compile_check tests.worker.kernels.attention_cases [--architecture 90]

A module of cases has ``CASES``, a dict from name to a function without arguments that calls the kernels' own wrappers
on tensors of device ``meta``: what is compiled is then what a launch with these shapes would compile, alignment and
constants included. Nothing runs. Must not run under TRITON_INTERPRET, whose kernels are no longer compilable.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import multiprocessing
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

#: Bytes of shared memory that one block of threads may have, by compute capability (CUDA C programming guide).
SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}

_CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
_USAGE = re.compile(r"REG:(?P<registers>\d+) STACK:(?P<stack>\d+) SHARED:\d+ LOCAL:(?P<local>\d+)")


@dataclass(frozen=True)
class Compiled:
    """One kernel for one architecture. ``spilled``: bytes of registers that went to memory, ``shared_memory``: bytes
    per block of threads, ``registers``: per thread."""

    case: str
    kernel: str
    architecture: int
    warps: int
    stages: int
    registers: int
    spilled: int
    shared_memory: int

    @property
    def faults(self) -> list[str]:
        """Why it must not ship: it spills, or does not fit."""
        limit = SHARED_MEMORY[self.architecture]
        faults = [f"spills {self.spilled} bytes"] if self.spilled else []
        if self.shared_memory > limit:
            faults.append(f"takes {self.shared_memory} bytes of shared memory, of {limit}")
        return faults


class _AbsentDevice:
    """A driver for Triton that has a target and no device."""

    def __init__(self, architecture: int) -> None:
        self._architecture = architecture

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._architecture, 32)

    def get_current_device(self) -> int:
        # Triton keeps compiled kernels by device: each architecture must look like a device of its own.
        return self._architecture

    def get_current_stream(self, device: int) -> int:
        return 0


@contextlib.contextmanager
def compiling_for(architecture: int, case: str = "") -> Iterator[list[Compiled]]:
    """Within it, a launch of a Triton kernel compiles it for ``architecture`` (80, 90, 100) and does not run it.

    Yields the list that the compiled kernels are added to. RuntimeError under TRITON_INTERPRET.
    """
    if triton.knobs.runtime.interpret:
        raise RuntimeError("kernels cannot be compiled under TRITON_INTERPRET: use a process without it")
    compiled: list[Compiled] = []
    launch, active = JITFunction.run, driver._active

    def compile_only(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = launch(self, *args, grid=grid, warmup=True, **kwargs)
        compiled.append(_measure(kernel, architecture, case))
        return kernel

    driver.set_active(_AbsentDevice(architecture))
    JITFunction.run = compile_only
    try:
        yield compiled
    finally:
        JITFunction.run = launch
        driver._active = active


def _measure(kernel: Any, architecture: int, case: str) -> Compiled:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(kernel.asm["cubin"])
        cubin.flush()
        command = [str(_CUOBJDUMP), "--dump-resource-usage", cubin.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    usage = _USAGE.search(text)
    if usage is None:
        raise RuntimeError(f"cuobjdump said nothing of the resources of {kernel.metadata.name}: {text}")
    return Compiled(
        case=case,
        kernel=kernel.metadata.name,
        architecture=architecture,
        warps=kernel.metadata.num_warps,
        stages=kernel.metadata.num_stages,
        registers=int(usage["registers"]),
        # Triton's kernels have no arrays of their own: all of a thread's memory is spilled registers.
        spilled=int(usage["stack"]) + int(usage["local"]),
        shared_memory=kernel.metadata.shared,
    )


def cases_of(module: str) -> dict[str, Callable[[], object]]:
    """``CASES`` of a module that can be imported by name."""
    return importlib.import_module(module).CASES


def _compile_case(job: tuple[str, str, int]) -> list[Compiled]:
    module, case, architecture = job
    with compiling_for(architecture, case) as compiled:
        cases_of(module)[case]()
    return compiled


def compile_modules(modules: Sequence[str], architectures: Sequence[int], processes: int = 2) -> list[Compiled]:
    """All cases of all modules for all architectures, over several processes."""
    jobs = [(module, case, number) for module in modules for case in cases_of(module) for number in architectures]
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("fork")) as pool:
        return [kernel for kernels in pool.map(_compile_case, jobs) for kernel in kernels]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("modules", nargs="+", metavar="MODULE", help="modules with CASES")
    parser.add_argument("--architecture", type=int, action="append", choices=sorted(SHARED_MEMORY))
    wanted = parser.parse_args()
    bad = False
    for kernel in compile_modules(wanted.modules, wanted.architecture or sorted(SHARED_MEMORY)):
        print(json.dumps(asdict(kernel) | {"faults": kernel.faults}), flush=True)
        bad = bad or bool(kernel.faults)
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
