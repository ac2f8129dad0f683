"""An import that containerd's garbage collector spoils is made once more, with all that is needed."""

import tarfile

import pytest

from e2e.cluster.errors import ClusterError
from images.builder import layers, load, oci

RACE = "parent snapshot sha256:ad19 does not exist: not found"


class Node:
    """What the loader asks of a cluster. The first imports fail with ``errors``, and what they took for there goes."""

    def __init__(self, held: set[str], *errors: str) -> None:
        self.held, self.errors = held, list(errors)
        self.named: dict[str, str] = {}
        self.archives: list[set[str]] = []

    def images(self) -> dict[str, str]:
        return dict(self.named)

    def blobs(self) -> set[str]:
        return set(self.held)

    def drop_image(self, name: str) -> None:
        self.named.pop(name, None)

    def load_image(self, archive) -> None:
        with tarfile.open(fileobj=archive, mode="r|") as members:
            self.archives.append({member.name.rpartition("/")[2] for member in members})
        self.named["registry.local/x:dev"] = "half"
        if self.errors:
            self.held = set()
            raise ClusterError(self.errors.pop(0))
        self.named["registry.local/x:dev"] = "whole"


@pytest.fixture
def image(tmp_path):
    path = tmp_path / "base.tar"
    path.write_bytes(b"base" * 100)
    return oci.image("registry.local/x:dev", [layers.Layer(path, layers.file_digest(path), 400)], {})


def test_the_second_import_brings_what_was_collected(image):
    layer = image.layers[0].digest
    node = Node({layer}, RACE)
    assert load.load(node, image)
    first, second = node.archives
    assert layer.removeprefix("sha256:") not in first
    assert layer.removeprefix("sha256:") in second
    assert node.images() == {"registry.local/x:dev": "whole"}


@pytest.mark.parametrize("errors", [["no space left on device"], [RACE, RACE]])
def test_an_import_that_fails_leaves_no_name_to_believe(image, errors):
    node = Node(set(), *errors)
    with pytest.raises(ClusterError, match=errors[-1][:8]):
        load.load(node, image)
    assert node.images() == {}
