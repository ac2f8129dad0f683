"""Builds images one after the other and, if asked, brings them into a cluster."""

from __future__ import annotations

import time
from collections.abc import Iterable

from e2e.cluster import host
from e2e.cluster.cluster import Cluster
from e2e.cluster.progress import Progress
from images.builder import load as loading
from images.builder.catalogue import IMAGES

# What is looked for → the Debian package that brings it.
TOOLS = {
    "mmdebstrap": "mmdebstrap",
    "busybox": "busybox-static",
    "gcc": "gcc",
    "g++": "g++",
    "/usr/include/stdlib.h": "libc6-dev",
    "readelf": "binutils",
}


def build_images(names: Iterable[str] | None = None, cluster: Cluster | None = None) -> None:
    """Build ``names`` (all when None), only the layers that changed, and import into ``cluster`` what it lacks."""
    progress = Progress()
    host.ensure_packages(progress, TOOLS)
    for each in names or IMAGES:
        started = time.monotonic()
        with progress.stage(f"image {each}") as stage:
            image = IMAGES[each].build(stage.note)
            built = time.monotonic()
            imported = cluster is not None and loading.load(cluster, image)
        done = f"imported in {time.monotonic() - built:.1f} s" if imported else "present" if cluster else "not loaded"
        progress.say(
            f"{image.name} {image.digest[:19]} {image.size / 1e6:.0f} MB, built in {built - started:.1f} s, {done}"
        )


def build_and_load(cluster: Cluster) -> None:
    """All images in the embedded cluster. A cluster of the user's must pull them itself: nothing is done."""
    if cluster.embedded:
        build_images(cluster=cluster)
    else:
        Progress().say("the cluster of KUBECONFIG pulls the images itself (docs/cluster.md says how to push them)")
