"""A cluster with the operator in it, once per session; a Kubernetes namespace of its own per test module."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from moonpool_worker.weights.resolve import packaged_smollm2

from e2e.cluster import CannotHostError, Cluster, ensure_cluster
from e2e.fleet import Fleet, Kubectl, install_operator
from images.builder import build_and_load


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Everything here waits for pods; what it waits for has a deadline of its own with a better message.
    for item in items:
        item.add_marker(pytest.mark.timeout(900))


@pytest.fixture(scope="session")
def cluster() -> Cluster:
    try:
        cluster = ensure_cluster()
    except CannotHostError as reason:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(reason))
    build_and_load(cluster)
    install_operator(cluster)
    return cluster


@pytest.fixture(scope="module")
def fleet(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[Fleet]:
    name = "e2e-" + request.module.__name__.rpartition("test_")[2].replace("_", "-")
    fleet = Fleet(cluster, name)
    fleet.delete_namespace()
    fleet.create_namespace()
    fleet.create_weights_volume(packaged_smollm2())
    yield fleet
    fleet.delete_namespace()
    Kubectl(cluster, "default").run("delete", "pv", f"weights-{name}", "--wait=false", check=False)
