"""The node's container images: what is there, how one is loaded, and how an earlier cluster's remains are removed."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path
from typing import IO

from e2e.cluster import components, settings
from e2e.cluster.errors import ClusterError
from e2e.cluster.node import NodeRecord, exec_argv

CTR = ("ctr", "-n", "k8s.io")


def ctr(record: NodeRecord, *argv: str, stdin: IO[bytes] | None = None) -> str:
    """Run containerd's client on the node."""
    command = exec_argv(record, [*CTR, *argv])
    done = subprocess.run(command, stdin=stdin or subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        raise ClusterError(f"`ctr {' '.join(argv)}` failed: {done.stderr.strip()}")
    return done.stdout


def await_ready(record: NodeRecord, timeout: float = 20.0) -> None:
    """Wait until containerd answers."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            ctr(record, "version")
            return
        except ClusterError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def parse_images(listing: str) -> dict[str, str]:
    """`ctr images ls` → {image name: manifest digest}."""
    rows = [line.split() for line in listing.splitlines()[1:]]
    return {row[0]: row[2] for row in rows if len(row) > 2 and not row[0].startswith("sha256:")}


def images(record: NodeRecord) -> dict[str, str]:
    return parse_images(ctr(record, "images", "ls"))


def blobs(record: NodeRecord) -> set[str]:
    """Digests in the content store."""
    return set(ctr(record, "content", "ls", "-q").split())


def load(record: NodeRecord, archive: IO[bytes]) -> None:
    """Import an OCI archive from an open file or pipe and unpack it."""
    ctr(record, "images", "import", "--snapshotter", "overlayfs", "-", stdin=archive)
    drop_superseded(record)


def drop(record: NodeRecord, name: str) -> None:
    """Remove an image's name and, before this returns, all that only it used."""
    if name in images(record):
        ctr(record, "images", "rm", "--sync", name)


def superseded(listing: str) -> list[str]:
    """Image names that only hold on to an image whose tag has moved on.

    The CRI plugin names every image by its config's digest too; when a tag moves, that name keeps the old layers.
    """
    rows = [line.split() for line in listing.splitlines()[1:]]
    tagged = set(parse_images(listing).values())
    return [row[0] for row in rows if len(row) > 2 and row[0].startswith("sha256:") and row[2] not in tagged]


def drop_superseded(record: NodeRecord) -> None:
    """Free the space of images that no tag names any more."""
    if old := superseded(ctr(record, "images", "ls")):
        ctr(record, "images", "rm", *old)


def clean_leftovers(layout: settings.Layout, record: NodeRecord) -> int:
    """Remove the containers of an earlier cluster, keep the images. Returns how many containers there were.

    The CRI plugin reads its sandboxes at start and never forgets them while it runs, so this happens in a containerd
    without it, which is stopped again before the real one starts.
    """
    for folder in ("io.containerd.grpc.v1.cri", "io.containerd.runtime.v2.task"):
        shutil.rmtree(layout.containerd_root / folder, ignore_errors=True)
    if not (layout.containerd_root / "io.containerd.metadata.v1.bolt").exists():
        return 0
    components.start(layout, record, components.containerd(layout, "containerd-janitor.toml"))
    await_ready(record)
    left = ctr(record, "containers", "ls", "-q").split()
    if left:
        ctr(record, "containers", "rm", *left)
    for snapshot in _container_snapshots(ctr(record, "snapshots", "ls")):
        ctr(record, "snapshots", "rm", snapshot)
    components.stop(layout, record, "containerd")
    return len(left)


def _container_snapshots(listing: str) -> Iterable[str]:
    """Writable snapshots: those of containers, and of unpacks that were interrupted."""
    rows = (line.split() for line in listing.splitlines()[1:])
    return [row[0] for row in rows if row and row[-1] == "Active"]


def purge(layout: settings.Layout) -> None:
    """Delete the image store. The node must be stopped."""
    root: Path = layout.containerd_root
    if root.exists():
        shutil.rmtree(root)
