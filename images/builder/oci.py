"""OCI images: config and manifest from layers, and the archive that containerd imports."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import IO

from images.builder.layers import Layer

LAYER_TYPE = "application/vnd.oci.image.layer.v1.tar"
CONFIG_TYPE = "application/vnd.oci.image.config.v1+json"
MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
EPOCH = "1970-01-01T00:00:00Z"


def digest_of(blob: bytes) -> str:
    return "sha256:" + hashlib.sha256(blob).hexdigest()


@dataclass(frozen=True)
class Image:
    """An image: its name, its layers, and its two JSON documents."""

    name: str
    layers: tuple[Layer, ...]
    config: bytes
    manifest: bytes

    @property
    def digest(self) -> str:
        """The manifest's digest: the image's identity, and what containerd lists."""
        return digest_of(self.manifest)

    @property
    def size(self) -> int:
        return sum(layer.size for layer in self.layers)


def image(name: str, layers: Sequence[Layer], config: dict) -> Image:
    """Compose an image. The same layers and config give the same digest."""
    config_blob = _json(
        {
            "architecture": "amd64",
            "os": "linux",
            "created": EPOCH,
            "config": config,
            "rootfs": {"type": "layers", "diff_ids": [layer.digest for layer in layers]},
            "history": [{"created": EPOCH, "created_by": "images.builder"} for _ in layers],
        }
    )
    manifest = _json(
        {
            "schemaVersion": 2,
            "mediaType": MANIFEST_TYPE,
            "config": {"mediaType": CONFIG_TYPE, "digest": digest_of(config_blob), "size": len(config_blob)},
            "layers": [{"mediaType": LAYER_TYPE, "digest": each.digest, "size": each.size} for each in layers],
        }
    )
    return Image(name, tuple(layers), config_blob, manifest)


def write_archive(image: Image, out: IO[bytes], present: Container[str] = ()) -> None:
    """Write an OCI archive to a file or pipe, leaving out layers that the reader has already."""
    index = _json(
        {
            "schemaVersion": 2,
            "manifests": [
                {
                    "mediaType": MANIFEST_TYPE,
                    "digest": image.digest,
                    "size": len(image.manifest),
                    "platform": {"architecture": "amd64", "os": "linux"},
                    "annotations": {
                        "io.containerd.image.name": image.name,
                        "org.opencontainers.image.ref.name": image.name,
                    },
                }
            ],
        }
    )
    with tarfile.open(fileobj=out, mode="w|", bufsize=1 << 20) as archive:
        _add(archive, "oci-layout", b'{"imageLayoutVersion":"1.0.0"}')
        _add(archive, "index.json", index)
        for blob in (image.manifest, image.config):
            _add(archive, _blob_path(digest_of(blob)), blob)
        for digest, layer in {layer.digest: layer for layer in image.layers}.items():
            if digest not in present:
                info = tarfile.TarInfo(_blob_path(digest))
                info.size = layer.size
                with layer.path.open("rb") as handle:
                    archive.addfile(info, handle)


def _blob_path(digest: str) -> str:
    return "blobs/" + digest.replace(":", "/")


def _add(archive: tarfile.TarFile, path: str, blob: bytes) -> None:
    info = tarfile.TarInfo(path)
    info.size = len(blob)
    archive.addfile(info, io.BytesIO(blob))


def _json(document: dict) -> bytes:
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
