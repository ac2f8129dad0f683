"""Every Triton kernel compiles for the GPUs that it is for, keeps its registers and fits into shared memory.

The cases are in `compiled_*.py` beside this file.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from moonpool_worker.kernels.triton.compile_check import SHARED_MEMORY, Compiled, cases_of

pytestmark = [pytest.mark.compiled, pytest.mark.slow]

ROOT = Path(__file__).parents[3]
MODULES = sorted(f"tests.worker.kernels.{path.stem}" for path in Path(__file__).parent.glob("compiled_*.py"))
CASES = [case for module in MODULES for case in cases_of(module)]


@pytest.fixture(scope="module")
def compiled() -> dict[tuple[str, int], list[Compiled]]:
    """All cases, in a process without the interpreter that the other tests run in."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "moonpool_worker.kernels.triton.compile_check", *MODULES]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    kernels: dict[tuple[str, int], list[Compiled]] = {}
    for line in done.stdout.splitlines():
        fields = json.loads(line)
        assert not fields.pop("faults") or done.returncode == 1
        kernel = Compiled(**fields)
        kernels.setdefault((kernel.case, kernel.architecture), []).append(kernel)
    assert done.returncode in (0, 1) and kernels, done.stderr
    return kernels


def test_case_names_are_unique() -> None:
    assert len(CASES) == len(set(CASES))


@pytest.mark.parametrize("architecture", sorted(SHARED_MEMORY))
@pytest.mark.parametrize("case", CASES)
def test_keeps_its_registers_and_fits(
    compiled: dict[tuple[str, int], list[Compiled]], case: str, architecture: int
) -> None:
    kernels = compiled[case, architecture]
    assert [f"{kernel.kernel} {fault}" for kernel in kernels for fault in kernel.faults] == []
