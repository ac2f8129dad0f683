"""Compile the C++ kernels: ``python -m moonpool_worker.kernels.cpu.build TARGET``.

Without torch, so that an image can be built where there is none.
"""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCES = Path(__file__).with_name("native")
#: Where an image has the library, so that it needs no compiler.
BESIDE = Path(__file__).with_name("kernels.so")
COMPILER = "g++"
_INSTRUCTIONS = ("-mavx2", "-mfma", "-mf16c", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512bf16")
#: No contraction: a sum that is written in two places must be rounded in the same way in both.
_FLAGS = (
    *("-std=c++20", "-O3", "-fPIC", "-shared", "-fno-math-errno", "-ffp-contract=off", "-mtune=icelake-server"),
    # The compiler's own intrinsics leave values undefined on purpose.
    *("-Wall", "-Wextra", "-Wno-uninitialized", "-Wno-maybe-uninitialized"),
)


class BuildFailed(Exception):
    """What the compiler said, or that there is none."""


@functools.cache
def source_digest() -> str:
    """16 hex digits over the sources and how they are compiled: a library is only used with the Python beside it."""
    digest = hashlib.sha256(" ".join((*_FLAGS, *_INSTRUCTIONS)).encode())
    for path in sorted(SOURCES.iterdir()):
        if path.suffix in (".h", ".cpp"):
            digest.update(f"\0{path.name}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def compile_library(target: Path) -> None:
    """Write the shared library, whole or not at all. Raises BuildFailed."""
    compiler = shutil.which(COMPILER)
    if compiler is None:
        raise BuildFailed(f"there is no {COMPILER}")
    target.parent.mkdir(parents=True, exist_ok=True)
    sources = sorted(str(path) for path in SOURCES.glob("*.cpp"))
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        library = Path(scratch) / target.name
        define = f'-DMOONPOOL_SOURCES="{source_digest()}"'
        command = [compiler, *_FLAGS, *_INSTRUCTIONS, define, *sources, "-o", str(library), "-lpthread"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise BuildFailed(f"{COMPILER} failed: {done.stderr.strip()[-2000:]}")
        os.replace(library, target)


if __name__ == "__main__":
    try:
        compile_library(Path(sys.argv[1]))
    except BuildFailed as failure:
        sys.exit(str(failure))
