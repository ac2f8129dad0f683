"""Rendered children: what makes a revision, what doesn't, and the traps each manifest has to avoid."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import yaml
from moonpool_api import names
from moonpool_api.inference_service import InferenceServiceSpec
from moonpool_api.kv_store import KVStoreSpec
from moonpool_operator.apply.children import contains, is_applied, stamp
from moonpool_operator.observe.pods import parse_replica_set
from moonpool_operator.plan.render.common import owner_reference
from moonpool_operator.plan.render.gateway import gateway_children
from moonpool_operator.plan.render.store import store_children
from moonpool_operator.plan.render.weights import Refused
from moonpool_operator.plan.render.worker import WorkerTemplate, render_worker, replica_set, workers_service
from moonpool_operator.plan.sizing import DoesNotFit, size_tiers
from moonpool_operator.settings import Settings

GOLDEN = Path(__file__).parent / "golden" / "children.yaml"
OWNER = owner_reference("InferenceService", "chat", "uid-1")


def spec(**edits: object) -> InferenceServiceSpec:
    tree: dict = {
        "model": {"source": {"persistentVolumeClaim": {"claimName": "weights", "path": "w.gguf"}}},
        "weightVersion": "v1",
        "cache": {"l1": {"size": "256Mi"}, "l2": {"size": "512Mi"}, "l3": {"kvStoreRef": {"name": "kv"}}},
    }
    for path, value in edits.items():
        *parents, leaf = path.split("__")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = value
    return InferenceServiceSpec.model_validate(tree)


def render(settings: Settings = Settings(), **edits: object) -> WorkerTemplate:
    return render_worker("ns", "chat", spec(**edits), settings)


def everything() -> list[dict]:
    worker = render()
    return [
        workers_service("ns", "chat", OWNER),
        *gateway_children("ns", "chat", OWNER, spec(), Settings()),
        replica_set("ns", "chat", OWNER, worker, 2, "sha256:" + "a" * 64),
        *store_children("ns", "kv", OWNER, KVStoreSpec(), Settings()),
    ]


NEW_REVISION = {
    "weight version": {"weightVersion": "v2"},
    "weights": {"model__source": {"persistentVolumeClaim": {"claimName": "other"}}},
    "path": {"model__source": {"persistentVolumeClaim": {"claimName": "weights", "path": "x"}}},
    "digest": {"model__digest": "sha256:" + "a" * 64},
    "served name": {"model__servedName": "m"},
    "attention backend": {"engine__attentionBackend": "torch"},
    "dtype": {"engine__dtype": "bfloat16"},
    "prefix caching": {"engine__prefixCaching": False},
    "prefix granularity": {"engine__prefixGranularity": 32},
    "model length": {"engine__maxModelLen": 1024},
    "batch tokens": {"engine__maxBatchTokens": 256},
    "running": {"engine__maxRunning": 4},
    "quantization": {"engine__quantization": "int8"},
    "request stats": {"engine__logRequestStats": True},
    "extra arguments": {"engine__extraArgs": ["--x"]},
    "l1": {"cache__l1": {"size": "300Mi"}},
    "l2 size": {"cache__l2": {"size": "300Mi"}},
    "l2 ratio": {"cache__l2": {"ratio": 3}},
    "l2 off": {"cache__l2": {"disabled": True}},
    "l3 off": {"cache__l3": None},
    "other store": {"cache__l3__kvStoreRef": {"name": "other"}},
    "sharing": {"cache__l3__sharing": "Shared"},
    "prefetch": {"cache__l3__prefetch": {"minPages": 9}},
    "prefetch base": {"cache__l3__prefetch": {"timeoutBase": "9s"}},
    "prefetch page": {"cache__l3__prefetch": {"timeoutPerPage": "9s"}},
    "prefetch batch": {"cache__l3__prefetch": {"batchPages": 9}},
    "resources": {"resources": {"limits": {"memory": "8Gi"}}},
    "node": {"scheduling": {"nodeSelector": {"a": "b"}}},
}
SAME_REVISION = {
    "replicas": {"replicas": 7},
    "gateway": {"gateway": {"replicas": 3, "policy": "random"}},
    "surge": {"rollout__maxSurge": 3},
    "bake": {"rollout__bake": "1h"},
    "drain timeout": {"rollout__drainTimeout": "5m"},
    "flush": {"rollout__flush": "Keep"},
    "paused": {"paused": True},
    "tenant quota": {"cache__l3__tenantQuota": "1Gi"},
}


@pytest.mark.parametrize("edit", NEW_REVISION.values(), ids=NEW_REVISION)
def test_what_a_worker_is_made_of_makes_a_revision(edit: dict) -> None:
    assert render(**edit).revision != render().revision


@pytest.mark.parametrize("edit", SAME_REVISION.values(), ids=SAME_REVISION)
def test_what_does_not_change_a_worker_makes_none(edit: dict) -> None:
    assert render(**edit).revision == render().revision


def test_the_drain_timeout_reaches_the_pods_that_start_from_now_on() -> None:
    pod = render(rollout__drainTimeout="5m").template["spec"]
    assert pod["terminationGracePeriodSeconds"] > 300
    arguments = pod["containers"][0]["args"]
    assert arguments[arguments.index("--drain-timeout") + 1] == "5m"


def test_every_image_can_be_set() -> None:
    settings = Settings(worker_image="w:1", gateway_image="g:1", store_image="s:1")
    assert render(settings).template["spec"]["containers"][0]["image"] == "w:1"
    gateway = gateway_children("ns", "c", OWNER, spec(), settings)
    text = json.dumps(gateway + store_children("ns", "k", OWNER, KVStoreSpec(), settings))
    assert '"g:1"' in text and '"s:1"' in text and "registry.local" not in text


def pods_of(manifest: dict) -> list[dict]:
    template = manifest.get("spec", {}).get("template")
    return [template["spec"]] if template else []


@pytest.mark.parametrize("pod", [p for m in everything() for p in pods_of(m)], ids=lambda p: p["containers"][0]["name"])
def test_every_pod_is_restricted(pod: dict) -> None:
    assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] == 65532
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in [*pod["containers"], *pod.get("initContainers", [])]:
        context = container["securityContext"]
        assert context["readOnlyRootFilesystem"] and not context["allowPrivilegeEscalation"]
        assert context["capabilities"] == {"drop": ["ALL"]}


def test_only_the_gateway_may_talk_to_the_api_server() -> None:
    for manifest in everything():
        for pod in pods_of(manifest):
            assert pod["automountServiceAccountToken"] is (pod["containers"][0]["name"] == "gateway")


def test_a_worker_in_short() -> None:
    manifest = replica_set("ns", "chat", OWNER, render(), 2, "sha256:" + "a" * 64)
    pod = manifest["spec"]["template"]["spec"]
    worker = pod["containers"][0]
    assert pod["readinessGates"] == [{"conditionType": names.READINESS_GATE}]
    assert worker["command"] + worker["args"][:2] == ["python3", "-m", "moonpool_worker", "serve", "/model/w.gguf"]
    assert worker["lifecycle"]["preStop"]["exec"]["command"] == ["python3", "-m", "moonpool_worker", "drain"]
    for flag, value in (
        ("--weight-version", "v1"),
        ("--isolation", "ns/chat"),
        ("--l1-size", str(256 << 20)),
        ("--l2-size", str(512 << 20)),
        ("--podinfo", names.PODINFO_DIR),
        ("--drain-timeout", "60s"),
    ):
        assert worker["args"][worker["args"].index(flag) + 1] == value
    assert worker["readinessProbe"]["httpGet"]["path"] == "/ready"
    assert worker["livenessProbe"]["httpGet"]["path"] == worker["startupProbe"]["httpGet"]["path"] == "/health"
    volume = next(v for v in pod["volumes"] if v["name"] == "model")
    assert volume["persistentVolumeClaim"] == {"claimName": "weights", "readOnly": True}
    parsed = parse_replica_set(manifest)
    assert parsed.expectation == render().expectation and parsed.pinned_digest.endswith("a")


def test_an_image_source_is_copied_by_an_init_container() -> None:
    template = render(model__source={"image": {"reference": "r/weights:1", "path": "/weights"}}).template
    init = template["spec"]["initContainers"][0]
    assert init["image"] == "r/weights:1" and init["command"] == ["cp", "-r", "/weights", "/model/"]
    assert template["spec"]["containers"][0]["args"][1] == "/model/weights"


def test_refused_sources() -> None:
    with pytest.raises(Refused, match="MOONPOOL_ALLOW_HOST_PATH"):
        render(model__source={"hostPath": {"path": "/w"}})
    assert render(Settings(allow_host_path=True), model__source={"hostPath": {"path": "/w"}})
    with pytest.raises(Refused, match="isn't supported in this version"):
        render(model__source={"huggingFace": {"repo": "a/b"}})


def test_sizes_and_the_sum_that_does_not_fit() -> None:
    cache = spec(cache__l2={"ratio": 2}).cache
    assert size_tiers(cache, spec().resources).l2 == 512 << 20
    assert size_tiers(spec(cache__l2={"disabled": True}).cache, spec().resources).l2 == 0
    with pytest.raises(DoesNotFit, match=r"256.0 MiB \+ L2 512.0 MiB \+ .* 1.0 GiB = 1.8 GiB .* 1.0 GiB"):
        render(resources={"limits": {"memory": "1Gi"}})


def test_the_master_runs_with_strict_tenants_and_short_release() -> None:
    master = next(m for m in everything() if m["kind"] == "Deployment" and m["metadata"]["name"] == "kv-master")
    assert master["spec"]["strategy"] == {"type": "Recreate"}
    arguments = master["spec"]["template"]["spec"]["containers"][0]["args"]
    for flag in (
        "--enable_multi_tenants=true",
        "--put_start_discard_timeout_sec=5",
        "--put_start_release_timeout_sec=30",
        "--default_kv_lease_ttl=5000",
        "--eviction_high_watermark_ratio=0.9",
    ):
        assert flag in arguments


def test_the_store_pods_advertise_their_address_and_can_hold_their_segment() -> None:
    stores = next(m for m in everything() if m["kind"] == "StatefulSet")
    container = stores["spec"]["template"]["spec"]["containers"][0]
    env = {item["name"]: item for item in container["env"]}
    assert env["MOONCAKE_LOCAL_HOSTNAME"]["valueFrom"]["fieldRef"]["fieldPath"] == "status.podIP"
    assert env["MOONCAKE_MASTER"]["value"] == "kv-master.ns.svc:50051"
    assert container["resources"]["limits"]["memory"] == "1536Mi"


def test_every_child_has_an_owner_and_a_valid_name() -> None:
    for manifest in [*everything(), *gateway_children("ns", "x" * 63, OWNER, spec(), Settings())]:
        assert manifest["metadata"]["ownerReferences"] == [OWNER]
        assert len(manifest["metadata"]["name"]) <= 63


def test_golden() -> None:
    """A change of the worker's manifest rolls every fleet when the operator is upgraded: look at the difference twice.

    UPDATE_GOLDEN=1 writes the file anew.
    """
    text = yaml.safe_dump_all(everything(), sort_keys=False, width=120)
    if os.environ.get("UPDATE_GOLDEN"):
        GOLDEN.parent.mkdir(exist_ok=True)
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text()


def test_live_objects_with_defaults_count_as_applied() -> None:
    desired = stamp({"metadata": {"name": "a"}, "spec": {"list": [{"a": 1}], "empty": "", "none": []}})
    live = {"metadata": {**desired["metadata"], "uid": "u"}, "spec": {"list": [{"a": 1, "b": 2}], "default": 3}}
    assert is_applied(desired, live)
    assert not is_applied(desired, {**live, "spec": {"list": [{"a": 2}]}}), "somebody changed a field"
    removed = stamp({"metadata": {"name": "a"}, "spec": {"list": [{"a": 1}]}})
    assert not is_applied(removed, live), "a field was taken out of the manifest"
    assert not contains({"list": [1, 2]}, {"list": [1]})
