"""The dependency layer: the Python packages that uv.lock pins for an extra, under /opt/moonpool/deps."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path

from images.builder import prune
from images.builder.errors import BuildError
from images.builder.layers import cache, pack

REPOSITORY = Path(__file__).parents[2]
PREFIX = "opt/moonpool/deps"
# The base layer has Debian's Python 3.11, so the packages (and their .pyc files) must be made by a 3.11 too.
PYTHON = "3.11"


def requirements(extras: Sequence[str], keep_base: Sequence[str] | None = None) -> str:
    """The locked requirements of these extras, with hashes.

    `keep_base` names those of the project's own dependencies that an image without the project's code still needs;
    None keeps them all.
    """
    command = ["uv", "export", "--frozen", "--no-emit-project", "--no-annotate", "--no-header", "--no-default-groups"]
    command += [flag for extra in extras for flag in ("--extra", extra)]
    if keep_base is not None:
        dropped = [name for name in base_dependencies() if name not in keep_base]
        command += [flag for name in dropped for flag in ("--prune", name)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    if done.returncode:
        raise BuildError(f"uv export failed: {done.stderr[-1500:]}")
    return done.stdout


def base_dependencies() -> list[str]:
    """Names of the project's dependencies outside of any extra."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    return [requirement_name(text) for text in project["dependencies"]]


def requirement_name(requirement: str) -> str:
    """`httpx[http2]>=0.28` → `httpx`."""
    return re.split(r"[\s\[<>=!~;]", requirement.strip(), maxsplit=1)[0].lower()


def recipe(locked: str, rules: prune.Rules | None) -> dict:
    """What identifies the layer's content."""
    return {"requirements": locked, "prune": rules.identity() if rules else None, "python": PYTHON, "revision": 1}


def build(target: Path, locked: str, rules: prune.Rules | None) -> None:
    """Install the packages into a scratch folder, prune them, compile them, and pack the layer.

    Files are hard links into uv's cache: they may be removed or replaced here, never changed in place.
    """
    stage = cache() / "stage"
    stage.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=stage) as scratch:
        root = Path(scratch)
        listing = root.parent / f"{root.name}.txt"
        listing.write_text(locked)
        deps = root / PREFIX
        _run("uv", "pip", "install", "-q", "--python", PYTHON, "--target", str(deps), "--no-deps", "-r", str(listing))
        listing.unlink()
        root.chmod(0o755)
        for script in (deps / "bin").glob("*"):
            rewrite_shebang(script)
        if rules:
            prune.apply(rules, deps)
        compile_all(deps)
        pack(root, target)


def rewrite_shebang(script: Path) -> None:
    """Point a console script at the image's Python. Replaces the file: it may be a hard link."""
    text = script.read_bytes()
    first, _, rest = text.partition(b"\n")
    if script.is_symlink() or not (first.startswith(b"#!") and b"python" in first):
        return
    mode = script.stat().st_mode
    script.unlink()
    script.write_bytes(b"#!/usr/bin/python3\n" + rest)
    script.chmod(mode)


def compile_all(folder: Path) -> None:
    """Byte-compile, so that pods on a read-only file system start fast.

    `unchecked-hash`: the files' times are flattened in the layer, so Python must not compare them. Files that don't
    compile (templates, code for another Python) are left as they are.
    """
    command = [_python(), "-m", "compileall", "-q", "-q", "-j", "2", "--invalidation-mode", "unchecked-hash"]
    subprocess.run([*command, "-s", str(folder.parents[2]), "-p", "/", str(folder)], capture_output=True)


def _python() -> str:
    """A Python 3.11: this one if it is, else one that uv finds."""
    if sys.version_info[:2] == (3, 11):
        return sys.executable
    found = subprocess.run(["uv", "python", "find", PYTHON], capture_output=True, text=True)
    if found.returncode:
        raise BuildError(f"no Python {PYTHON} found to compile with: uv python install {PYTHON}")
    return found.stdout.strip()


def _run(*argv: str) -> None:
    done = subprocess.run(argv, cwd=REPOSITORY, capture_output=True, text=True)
    if done.returncode:
        raise BuildError(f"`{' '.join(argv[:3])}` failed: {done.stderr[-2000:]}")
