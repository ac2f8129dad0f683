"""`python -m images.builder build [NAME...] [--load]`, `list`, `export NAME FILE`."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from e2e.cluster import host, settings
from e2e.cluster.cluster import embedded
from e2e.cluster.errors import ClusterError
from e2e.cluster.lifecycle import given_kubeconfig
from e2e.cluster.progress import Progress
from images.builder import load as loading
from images.builder.catalogue import IMAGES
from images.builder.errors import BuildError

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Moonpool's container images, without Docker.")
# What is looked for → the Debian package that brings it.
TOOLS = {
    "mmdebstrap": "mmdebstrap",
    "busybox": "busybox-static",
    "gcc": "gcc",
    "/usr/include/stdlib.h": "libc6-dev",
    "readelf": "binutils",
}
Names = Annotated[list[str] | None, typer.Argument(help="Which images; without one, all.")]
Name = Annotated[str, typer.Option("--name", help="Which embedded cluster.")]


@contextmanager
def _reported() -> Iterator[None]:
    try:
        yield
    except (BuildError, ClusterError) as error:
        print(error, file=sys.stderr)
        raise typer.Exit(getattr(error, "exit_code", 1)) from None


@app.command()
def build(
    names: Names = None,
    load: Annotated[bool, typer.Option("--load", help="Import into the embedded cluster.")] = False,
    name: Name = settings.DEFAULT_NAME,
) -> None:
    """Build images, and only the layers that changed."""
    unknown = [each for each in names or () if each not in IMAGES]
    if unknown:
        raise typer.BadParameter(f"no image {', '.join(unknown)}; there are {', '.join(IMAGES)}")
    layout = settings.Layout(name)
    with _reported():
        if load and given_kubeconfig(layout):
            raise ClusterError("KUBECONFIG names a cluster of yours: images can be loaded into the embedded one only")
        cluster = embedded(layout) if load else None
        progress = Progress()
        host.ensure_packages(progress, TOOLS)
        for each in names or IMAGES:
            started = time.monotonic()
            with progress.stage(f"image {each}") as stage:
                image = IMAGES[each].build(stage.note)
                built = time.monotonic()
                imported = cluster is not None and loading.load(cluster, image)
            done = f"imported in {time.monotonic() - built:.1f} s" if imported else "present" if load else "not loaded"
            print(
                f"{image.name} {image.digest[:19]} {image.size / 1e6:.0f} MB, built in {built - started:.1f} s, {done}"
            )


@app.command("list")
def list_() -> None:
    """The images that can be built."""
    for each, image in IMAGES.items():
        print(f"{each:18} {image.tag}")


@app.command()
def export(image: str, target: Path) -> None:
    """Write one image as an OCI archive."""
    with _reported():
        loading.export(IMAGES[image].build(print), target)
        print(target)


if __name__ == "__main__":
    app()
