"""`python -m images.builder build [NAME...] [--load]`, `list`, `export NAME FILE`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from e2e.cluster import settings
from e2e.cluster.cluster import embedded
from e2e.cluster.errors import ClusterError
from e2e.cluster.lifecycle import given_kubeconfig
from images.builder import load as loading
from images.builder.build import build_images
from images.builder.catalogue import IMAGES
from images.builder.errors import BuildError

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Moonpool's container images, without Docker.")
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
        build_images(names, cluster)


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
