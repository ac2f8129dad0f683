"""The committed CRD manifests are those that the models generate, and they are structural."""

from __future__ import annotations

from pathlib import Path

import pytest
from moonpool_api.__main__ import render
from moonpool_api.schema import Schema, custom_resource_definitions

FOLDER = Path(__file__).parents[2] / "crds"
MANIFESTS = custom_resource_definitions()


@pytest.mark.parametrize("name", MANIFESTS)
def test_committed_manifest_is_generated(name: str) -> None:
    assert (FOLDER / name).read_text() == render(MANIFESTS[name]), "run `uv run python -m moonpool_api`"


@pytest.mark.parametrize("name", MANIFESTS)
def test_stays_below_the_last_applied_annotation_limit(name: str) -> None:
    assert len(render(MANIFESTS[name])) < 100_000


def _walk(schema: Schema, path: str = "") -> list[tuple[str, Schema]]:
    nodes = [(path, schema)]
    for name, child in schema.get("properties", {}).items():
        nodes += _walk(child, f"{path}.{name}")
    if isinstance(schema.get("items"), dict):
        nodes += _walk(schema["items"], f"{path}[]")
    return nodes


@pytest.mark.parametrize("name", MANIFESTS)
def test_every_node_has_a_type_and_nothing_kubernetes_refuses(name: str) -> None:
    root = MANIFESTS[name]["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    for path, node in _walk(root):
        assert "type" in node, path
        assert not node.keys() & {"$ref", "anyOf", "const", "title", "$defs"}, path


def test_operator_and_worker_folders_are_not_packages() -> None:
    # A package called operator would shadow the standard library's module.
    root = Path(__file__).parents[2]
    assert not (root / "operator" / "__init__.py").exists()
    assert not (root / "worker" / "__init__.py").exists()
