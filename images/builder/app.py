"""The project's own code, as a layer of its own: the only thing that changes from one edit to the next.

The worker's C++ kernels are compiled here, since images have no compiler.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from moonpool_worker.kernels.cpu.build import BESIDE, BuildFailed, compile_library

from images.builder.deps import REPOSITORY, compile_all
from images.builder.errors import BuildError
from images.builder.layers import cache, pack

PREFIX = "opt/moonpool/app"
PACKAGES = ("crds/moonpool_api", "operator/moonpool_operator", "worker/moonpool_worker")


def sources() -> Iterator[Path]:
    """Every file of the three packages, in a fixed order."""
    for package in PACKAGES:
        for path in sorted((REPOSITORY / package).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                yield path


def recipe() -> dict:
    """A digest over names and contents."""
    digest = hashlib.sha256()
    for path in sources():
        digest.update(f"{path.relative_to(REPOSITORY)}\0".encode() + path.read_bytes() + b"\0")
    return {"files": digest.hexdigest(), "revision": 2}


def build(target: Path) -> None:
    stage = cache() / "stage"
    stage.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=stage) as scratch:
        root = Path(scratch)
        root.chmod(0o755)
        for path in sources():
            # crds/moonpool_api/x.py → opt/moonpool/app/moonpool_api/x.py
            inside = root / PREFIX / path.relative_to(REPOSITORY).relative_to(path.relative_to(REPOSITORY).parts[0])
            inside.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, inside)
        try:
            compile_library(root / PREFIX / BESIDE.relative_to(REPOSITORY / "worker"))
        except BuildFailed as failure:
            raise BuildError(f"the C++ kernels: {failure}") from failure
        compile_all(root / PREFIX)
        pack(root, target)
