"""Brings images into the embedded cluster's containerd, and only what it doesn't have."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from e2e.cluster.cluster import Cluster
from e2e.cluster.errors import ClusterError
from images.builder import oci


def load(cluster: Cluster, image: oci.Image) -> bool:
    """Import an image unless the node has exactly it. Returns whether it was imported.

    Layers that the node holds are left out of the archive, so a change of code costs seconds. That has a race:
    containerd's import finds what an older image left, does not hold on to it, and its garbage collector may remove it
    before it is used. Then the import fails with "not found" after the image has got its name: the name is taken away,
    so that nobody believes it, and the second import knows what it has to bring.
    """
    if cluster.images().get(image.name) == image.digest:
        return False
    for last in (False, True):
        try:
            stream(cluster, image, present=cluster.blobs())
            break
        except ClusterError as error:
            cluster.drop_image(image.name)
            if last or "not found" not in str(error):
                raise
    return True


def stream(cluster: Cluster, image: oci.Image, present: set[str]) -> None:
    """Write the archive into a pipe whose other end is `ctr images import`."""
    read, write = os.pipe()

    def produce() -> None:
        # The importer may end early, with an error of its own that is worth more than a broken pipe.
        try:
            with os.fdopen(write, "wb") as out:
                oci.write_archive(image, out, present)
        except BrokenPipeError:
            pass

    producer = threading.Thread(target=produce, daemon=True)
    producer.start()
    with os.fdopen(read, "rb") as archive:
        cluster.load_image(archive)
    producer.join()


def export(image: oci.Image, target: Path) -> None:
    """Write an image as an OCI archive for other tools (`podman load`, `skopeo copy oci-archive:`)."""
    with target.open("wb") as out:
        oci.write_archive(image, out)
