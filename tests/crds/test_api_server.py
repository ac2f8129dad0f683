"""What the API server does with good and bad custom resources, asked of a real one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.api_server import ApiServer, binaries, running_api_server

pytestmark = pytest.mark.skipif(binaries() is None, reason="no cached Kubernetes: `uv run python -m e2e.cluster up`")

CRDS = Path(__file__).parents[2] / "crds"


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    with running_api_server(tmp_path_factory.mktemp("api")) as server:
        applied = server.kubectl("apply", "-f", str(CRDS / "inferenceservices.yaml"), "-f", str(CRDS / "kvstores.yaml"))
        assert applied.returncode == 0, applied.stderr
        waited = server.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=30s")
        assert waited.returncode == 0, waited.stderr
        yield server


def service(**edits: object) -> dict:
    spec: dict = {
        "model": {"source": {"persistentVolumeClaim": {"claimName": "weights", "path": "smollm2.gguf"}}},
        "weightVersion": "v1",
        "cache": {"l1": {"size": "256Mi"}, "l2": {"size": "512Mi"}, "l3": {"kvStoreRef": {"name": "kv"}}},
    }
    for path, value in edits.items():
        node = spec
        *parents, leaf = path.split("__")
        for name in parents:
            node = node.setdefault(name, {})
        node[leaf] = value
    return {
        "apiVersion": "moonpool.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": "chat", "namespace": "default"},
        "spec": spec,
    }


def store(**spec: object) -> dict:
    return {
        "apiVersion": "moonpool.dev/v1alpha1",
        "kind": "KVStore",
        "metadata": {"name": "kv", "namespace": "default"},
        "spec": spec,
    }


def dry_run(api: ApiServer, manifest: dict):
    return api.kubectl("apply", "--dry-run=server", "-f", "-", stdin=yaml.safe_dump(manifest))


@pytest.mark.parametrize("manifest", [service(), store(), store(stores={"replicas": 2, "segmentSize": "512Mi"})])
def test_good_resources_are_accepted(api: ApiServer, manifest: dict) -> None:
    answer = dry_run(api, manifest)
    assert answer.returncode == 0, answer.stderr


@pytest.mark.parametrize(
    ("manifest", "message"),
    [
        (service(repliccas=2), 'unknown field "spec.repliccas"'),
        (service(cache__l2__size="12 GB"), "spec.cache.l2.size"),
        (service(cache__l1__size="512 MB"), "spec.cache.l1.size"),
        (service(cache__l2={"size": "1Gi", "ratio": 2}), "give size or ratio, not both"),
        (service(cache__l2={"disabled": True, "ratio": 2}), "a disabled tier takes neither"),
        (service(model__source={}), "give exactly one of persistentVolumeClaim, image, huggingFace, hostPath"),
        (
            service(model__source={"image": {"reference": "a.b/c:1"}, "hostPath": {"path": "/x"}}),
            "give exactly one of",
        ),
        (service(model__digest="sha256:abc"), "spec.model.digest"),
        (service(weightVersion=""), "spec.weightVersion"),
        (service(rollout={"maxSurge": 0, "maxUnavailable": 0}), "no pod could ever be replaced"),
        (service(rollout={"bake": "ten minutes"}), "spec.rollout.bake"),
        (service(engine={"attentionBackend": "flash"}), "spec.engine.attentionBackend"),
        (service(replicas=-1), "spec.replicas"),
        (store(stores={"segmentSize": "1Mi"}), "must be at least 16Mi"),
        (store(master={"replicas": 2}), "spec.master.replicas"),
    ],
)
def test_bad_resources_are_refused_with_the_field_named(api: ApiServer, manifest: dict, message: str) -> None:
    answer = dry_run(api, manifest)
    assert answer.returncode != 0
    assert message in answer.stderr


def test_columns_and_scale(api: ApiServer) -> None:
    assert api.kubectl("apply", "-f", "-", stdin=yaml.safe_dump(service())).returncode == 0
    assert api.kubectl("scale", "isvc/chat", "--replicas=3").returncode == 0
    listed = api.kubectl("get", "isvc", "chat").stdout
    assert listed.split("\n")[0].split() == [
        "NAME", "READY", "REASON", "REPLICAS", "DESIRED", "VERSION", "ROLLOUT", "FLUSHED", "AGE",
    ]  # fmt: skip
    assert listed.split("\n")[1].split()[1:3] == ["3", "v1"]
