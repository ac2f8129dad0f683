"""Images: digests follow content, archives are whole, and layers that the reader has are left out."""

import io
import json
import tarfile

import pytest

from images.builder import layers, oci


@pytest.fixture
def two_layers(tmp_path):
    made = []
    for name in ("base", "app"):
        path = tmp_path / f"{name}.tar"
        path.write_bytes(name.encode() * 100)
        made.append(layers.Layer(path, layers.file_digest(path), path.stat().st_size))
    return made


def blobs(image, present=()):
    out = io.BytesIO()
    oci.write_archive(image, out, present)
    out.seek(0)
    with tarfile.open(fileobj=out) as archive:
        return {member.name: archive.extractfile(member).read() for member in archive if member.isfile()}


def test_the_same_input_gives_the_same_image(two_layers):
    first = oci.image("registry.local/x:dev", two_layers, {"User": "65532"})
    assert first.digest == oci.image("registry.local/x:dev", two_layers, {"User": "65532"}).digest
    assert first.digest != oci.image("registry.local/x:dev", two_layers, {"User": "0"}).digest
    assert first.digest != oci.image("registry.local/x:dev", two_layers[:1], {"User": "65532"}).digest


def test_every_blob_is_named_by_its_digest(two_layers):
    image = oci.image("registry.local/x:dev", two_layers, {})
    files = blobs(image)
    for name, content in files.items():
        if name.startswith("blobs/"):
            assert oci.digest_of(content) == name.removeprefix("blobs/").replace("/", ":")
    index = json.loads(files["index.json"])
    manifest = json.loads(files["blobs/" + index["manifests"][0]["digest"].replace(":", "/")])
    config = json.loads(files["blobs/" + manifest["config"]["digest"].replace(":", "/")])
    assert config["rootfs"]["diff_ids"] == [each["digest"] for each in manifest["layers"]]
    assert index["manifests"][0]["annotations"]["io.containerd.image.name"] == "registry.local/x:dev"


def test_layers_that_are_present_are_left_out(two_layers):
    image = oci.image("registry.local/x:dev", two_layers, {})
    names = set(blobs(image, present={two_layers[0].digest}))
    assert "blobs/" + two_layers[0].digest.replace(":", "/") not in names
    assert "blobs/" + two_layers[1].digest.replace(":", "/") in names


def test_a_layer_used_twice_is_sent_once(two_layers):
    image = oci.image("registry.local/x:dev", [two_layers[0], two_layers[0]], {})
    assert len([name for name in blobs(image) if name.startswith("blobs/")]) == 3
