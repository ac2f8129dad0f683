"""The handle that tests and tools hold on a cluster."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from e2e.cluster import image_store, node, settings
from e2e.cluster.errors import ClusterError


@dataclass(frozen=True)
class Cluster:
    """A usable cluster. `embedded` tells whether the node is ours; only then can it be reached into."""

    name: str
    kubeconfig: Path
    kubectl: Path
    state_dir: Path
    volumes_dir: Path
    embedded: bool

    def node_exec(
        self, argv: Sequence[str], *, check: bool = True, stdin: IO[bytes] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on the node, as root, in all its namespaces. Raises ClusterError unless it succeeds."""
        command = node.exec_argv(self._record(), argv)
        done = subprocess.run(command, capture_output=True, text=True, stdin=stdin or subprocess.DEVNULL)
        if check and done.returncode:
            raise ClusterError(f"`{' '.join(argv)}` on the node exited with {done.returncode}: {done.stderr.strip()}")
        return done

    def run_kubectl(self, *argv: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run kubectl against this cluster."""
        command = [str(self.kubectl), "--kubeconfig", str(self.kubeconfig), *argv]
        done = subprocess.run(command, capture_output=True, text=True)
        if check and done.returncode:
            raise ClusterError(f"`kubectl {' '.join(argv)}` failed: {done.stderr.strip()}")
        return done

    def images(self) -> dict[str, str]:
        """{image name: manifest digest} of the node."""
        return image_store.images(self._record())

    def blobs(self) -> set[str]:
        """Digests of the layers, configs and manifests that the node holds."""
        return image_store.blobs(self._record())

    def load_image(self, archive: Path | IO[bytes]) -> None:
        """Import an OCI image archive, from a tar file or an open pipe."""
        if isinstance(archive, Path):
            with archive.open("rb") as handle:
                image_store.load(self._record(), handle)
        else:
            image_store.load(self._record(), archive)

    def drop_image(self, name: str) -> None:
        """Forget an image; nothing happens when there is none of the name."""
        image_store.drop(self._record(), name)

    def _record(self) -> node.NodeRecord:
        if not self.embedded:
            raise ClusterError("the cluster of KUBECONFIG isn't ours: its nodes and images can't be reached into")
        record = node.load(settings.Layout(self.name))
        if not record or not record.alive:
            raise ClusterError("the embedded cluster is not up: python -m e2e.cluster up")
        return record


def embedded(layout: settings.Layout) -> Cluster:
    return Cluster(
        name=layout.name,
        kubeconfig=layout.kubeconfig,
        kubectl=layout.kubernetes_bin / "kubectl",
        state_dir=layout.state,
        volumes_dir=layout.volumes,
        embedded=True,
    )


def external(layout: settings.Layout, kubeconfig: Path, kubectl: Path) -> Cluster:
    return Cluster(
        name=layout.name,
        kubeconfig=kubeconfig,
        kubectl=kubectl,
        state_dir=layout.state,
        volumes_dir=layout.volumes,
        embedded=False,
    )
