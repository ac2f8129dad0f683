"""The worker's pod template, its revision, and the ReplicaSet of a revision."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass

from moonpool_api import names
from moonpool_api.inference_service import InferenceServiceSpec
from moonpool_api.quantity import parse_duration

from moonpool_operator.clients.kube import Object
from moonpool_operator.observe.model import Expectation
from moonpool_operator.observe.pods import ANNOTATION_EXPECTED
from moonpool_operator.plan.render import common
from moonpool_operator.plan.render.weights import weights_of
from moonpool_operator.plan.sizing import MiB, Sizes, mebibytes, size_tiers
from moonpool_operator.settings import Settings

#: A draining worker answers for so long until the gateway has noticed (measured: 1 to 2 s).
DRAIN_NOTICE = 3
#: From the end of a drain to the end of the process, with room for a busy machine.
STOP_MARGIN = 12
#: Stands for rollout.drainTimeout while a revision is computed: how long a drain may take is no new revision.
_ANY_DRAIN = "0s"


@dataclass(frozen=True)
class WorkerTemplate:
    """A rendered worker: ``template`` is the pod template without the revision's label."""

    revision: str
    template: Object
    expectation: Expectation
    sizes: Sizes


def render_worker(namespace: str, name: str, spec: InferenceServiceSpec, settings: Settings) -> WorkerTemplate:
    """Raises Refused or DoesNotFit when this spec can't be run."""
    sizes = size_tiers(spec.cache, spec.resources)
    weights = weights_of(spec.model.source, settings.allow_host_path, settings.image_pull_policy)
    expectation = expectation_of(namespace, name, spec, weights.identity)
    identity = _template(namespace, name, spec, settings, sizes, expectation, _ANY_DRAIN)
    text = json.dumps(identity, sort_keys=True, separators=(",", ":"))
    revision = hashlib.sha256(text.encode()).hexdigest()[:10]
    template = _template(namespace, name, spec, settings, sizes, expectation, spec.rollout.drain_timeout)
    return WorkerTemplate(revision, template, expectation, sizes)


def expectation_of(namespace: str, name: str, spec: InferenceServiceSpec, source: str) -> Expectation:
    l3 = spec.cache.l3
    shared = l3 is not None and l3.sharing == "Shared"
    return Expectation(
        source=source,
        weight_version=spec.weight_version,
        dtype=spec.engine.dtype,
        quantization=spec.engine.quantization,
        attention_backend=spec.engine.attention_backend,
        prefix_granularity=spec.engine.prefix_granularity,
        tensor_parallel=spec.engine.tensor_parallel,
        isolation="" if shared else f"{namespace}/{name}",
        digest=spec.model.digest or "",
        store=l3.kv_store_ref.name if l3 else "",
    )


def replica_set(
    namespace: str,
    name: str,
    owner: Object,
    worker: WorkerTemplate,
    replicas: int,
    pinned_digest: str,
) -> Object:
    labels = _labels(name) | {names.LABEL_REVISION: worker.revision}
    metadata = common.metadata(names.revision_name(name, worker.revision), namespace, labels, owner)
    if pinned_digest:
        metadata["annotations"] = {names.ANNOTATION_PINNED_DIGEST: pinned_digest}
    template = {**worker.template, "metadata": {**worker.template["metadata"]}}
    template["metadata"]["labels"] = {**labels, names.LABEL_MANAGED_BY: names.MANAGED_BY}
    return {
        "apiVersion": "apps/v1",
        "kind": "ReplicaSet",
        "metadata": metadata,
        "spec": {"replicas": replicas, "selector": {"matchLabels": labels}, "template": template},
    }


def workers_service(namespace: str, name: str, owner: Object) -> Object:
    """Headless: names for the workers' addresses, for people and for Prometheus; the gateway watches pods itself."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": common.metadata(names.child_name(name, "workers"), namespace, _labels(name), owner),
        "spec": {
            "clusterIP": "None",
            "selector": _labels(name),
            "ports": [{"name": "http", "port": names.PORT_WORKER, "targetPort": "http", "protocol": "TCP"}],
        },
    }


def _labels(name: str) -> dict[str, str]:
    return {names.LABEL_SERVICE: name, names.LABEL_ROLE: names.ROLE_WORKER}


def _arguments(
    namespace: str, name: str, spec: InferenceServiceSpec, sizes: Sizes, expected: Expectation, path: str, drain: str
) -> list[str]:
    engine, l3 = spec.engine, spec.cache.l3
    arguments = [
        "serve", path,
        "--host", "0.0.0.0", "--port", str(names.PORT_WORKER),
        "--served-name", spec.model.served_name or name,
        "--weight-version", spec.weight_version,
        "--isolation", expected.isolation,
        "--dtype", engine.dtype,
        "--attention-backend", engine.attention_backend,
        "--prefix-granularity", str(engine.prefix_granularity),
        "--max-batch-tokens", str(engine.max_batch_tokens),
        "--max-running", str(engine.max_running),
        "--prefix-caching" if engine.prefix_caching else "--no-prefix-caching",
        "--l1-size", str(sizes.l1),
        "--l2-size", str(sizes.l2),
        "--l3" if l3 else "--no-l3",
        "--podinfo", names.PODINFO_DIR,
        "--drain-timeout", drain,
    ]  # fmt: skip
    if engine.max_model_len is not None:
        arguments += ["--max-model-len", str(engine.max_model_len)]
    if l3:
        arguments += [
            "--prefetch-min-pages", str(l3.prefetch.min_pages),
            "--prefetch-batch-pages", str(l3.prefetch.batch_pages),
        ]  # fmt: skip
        if l3.prefetch.timeout_base is not None:
            arguments += ["--prefetch-timeout-base", l3.prefetch.timeout_base]
        if l3.prefetch.timeout_per_page is not None:
            arguments += ["--prefetch-timeout-per-page", l3.prefetch.timeout_per_page]
    if engine.quantization != "none":
        arguments += ["--quantization", engine.quantization]
    if engine.log_request_stats:
        arguments.append("--log-request-stats")
    return arguments + engine.extra_args


def _template(
    namespace: str,
    name: str,
    spec: InferenceServiceSpec,
    settings: Settings,
    sizes: Sizes,
    expected: Expectation,
    drain: str,
) -> Object:
    weights = weights_of(spec.model.source, settings.allow_host_path, settings.image_pull_policy)
    podinfo: Object = {
        "name": "podinfo",
        "downwardAPI": {"items": [{"path": "annotations", "fieldRef": {"fieldPath": "metadata.annotations"}}]},
    }
    volumes = [common.TMP_VOLUME, podinfo, *weights.volumes]
    mounts = [
        common.TMP_MOUNT,
        {"name": "podinfo", "mountPath": names.PODINFO_DIR, "readOnly": True},
        *weights.mounts,
    ]
    if sizes.l2:
        # The host tier is shared memory, so that it can survive the engine; a container's own /dev/shm is 64 MiB.
        limit = mebibytes(sizes.l2 + sizes.l2 // 8 + 64 * MiB)
        volumes.append({"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": limit}})
        mounts.append({"name": "shm", "mountPath": "/dev/shm"})
    container: Object = {
        "name": "worker",
        "image": settings.worker_image,
        "imagePullPolicy": settings.image_pull_policy,
        "command": ["python3", "-m", "moonpool_worker"],
        "args": _arguments(namespace, name, spec, sizes, expected, weights.path, drain),
        "env": [
            common.field_env("POD_NAME", "metadata.name"),
            common.field_env("POD_UID", "metadata.uid"),
            common.field_env("POD_IP", "status.podIP"),
            common.env("HOME", "/tmp"),
            common.env("TRITON_CACHE_DIR", "/tmp/triton"),
            common.env("TORCHINDUCTOR_CACHE_DIR", "/tmp/inductor"),
        ],
        "ports": [{"name": "http", "containerPort": names.PORT_WORKER, "protocol": "TCP"}],
        "resources": common.resources(spec.resources, {"cpu": "100m", "memory": mebibytes(sizes.memory)}),
        "securityContext": common.container_security(),
        "volumeMounts": mounts,
        "startupProbe": _probe("/health", period=2, failures=150),
        "livenessProbe": _probe("/health", period=10, failures=6),
        "readinessProbe": _probe("/ready", period=2, failures=2) | {"initialDelaySeconds": _READY_AFTER},
        "lifecycle": {"preStop": {"exec": {"command": ["python3", "-m", "moonpool_worker", "drain"]}}},
        "terminationMessagePath": "/dev/termination-log",
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    pod: Object = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": common.pod_security(),
        "terminationGracePeriodSeconds": math.ceil(parse_duration(drain)) + DRAIN_NOTICE + STOP_MARGIN,
        "readinessGates": [{"conditionType": names.READINESS_GATE}],
        "containers": [container],
        "volumes": volumes,
    }
    if weights.init_containers:
        pod["initContainers"] = weights.init_containers
    if spec.scheduling.node_selector:
        pod["nodeSelector"] = dict(spec.scheduling.node_selector)
    expected_json = json.dumps(asdict(expected), sort_keys=True)
    return {"metadata": {"annotations": {ANNOTATION_EXPECTED: expected_json}}, "spec": pod}


#: smg drains a worker whose pod stopped being Ready for 5 s and does not see it come back within that time: a container
#: that restarts faster stays unrouted until the next resync, 50 s later (measured).
_READY_AFTER = 9


def _probe(path: str, period: int, failures: int) -> Object:
    return {
        "httpGet": {"path": path, "port": "http", "scheme": "HTTP"},
        "periodSeconds": period,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }
