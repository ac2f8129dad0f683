"""Layers: deterministic, uncompressed tars, cached by the hash of what went into them.

Uncompressed because they never leave the machine: gzip of a 1.5 GB layer takes longer than everything else together.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from images.builder.errors import BuildError

DETERMINISTIC = ("--sort=name", "--mtime=@0", "--owner=0", "--group=0", "--numeric-owner", "--format=gnu")


def cache() -> Path:
    """Where layers are kept; `MOONPOOL_CACHE` moves it."""
    root = Path(os.environ.get("MOONPOOL_CACHE", Path.home() / ".cache" / "moonpool"))
    return root / "images"


@dataclass(frozen=True)
class Layer:
    """A finished layer. Uncompressed, so its diff id is its digest."""

    path: Path
    digest: str
    size: int


def recipe_key(recipe: object) -> str:
    """16 hex digits that identify a recipe, whatever the order of its keys."""
    text = json.dumps(recipe, sort_keys=True, default=list)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def layer(name: str, recipe: object, build: Callable[[Path], None]) -> tuple[Layer, bool]:
    """The layer of this recipe, and whether it had to be built. `build` writes the tar to the path it's given.

    Only the latest layer of a name is kept.
    """
    folder = cache() / "layers"
    folder.mkdir(parents=True, exist_ok=True)
    tar = folder / f"{name}-{recipe_key(recipe)}.tar"
    record = tar.with_suffix(".json")
    built = not (tar.exists() and record.exists())
    if built:
        scratch = tar.with_suffix(".partial")
        build(scratch)
        facts = {"digest": file_digest(scratch), "size": scratch.stat().st_size, "recipe": recipe}
        scratch.replace(tar)
        record.write_text(json.dumps(facts, indent=1, default=list) + "\n")
        for old in folder.glob(f"{name}-{'?' * 16}.*"):
            if old.stem != tar.stem:
                old.unlink()
    facts = json.loads(record.read_text())
    return Layer(tar, facts["digest"], facts["size"]), built


def file_digest(path: Path) -> str:
    with path.open("rb") as handle:
        return "sha256:" + hashlib.file_digest(handle, "sha256").hexdigest()


def pack(root: Path, target: Path) -> None:
    """Tar everything below `root`, owned by root, with no times, in a fixed order."""
    done = subprocess.run(
        ["tar", *DETERMINISTIC, "-cf", str(target), "-C", str(root), "."], capture_output=True, text=True
    )
    if done.returncode:
        raise BuildError(f"tar of {root} failed: {done.stderr[-1000:]}")
