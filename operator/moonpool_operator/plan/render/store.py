"""A KVStore's children: Mooncake's master, its headless Service, and the pods that lend their memory."""

from __future__ import annotations

from moonpool_api import names
from moonpool_api.kv_store import KVStoreSpec
from moonpool_api.quantity import parse_bytes, parse_duration

from moonpool_operator.clients.kube import Object
from moonpool_operator.plan.render import common
from moonpool_operator.plan.sizing import MiB, mebibytes
from moonpool_operator.settings import Settings

_TENANTS = "/data/tenants.yaml"
_NO_TENANTS = "version: 1\ntenants: []\n"
#: The store's own process beside its segment: 97 MB resident, buffers and room for the page tables.
STORE_HEADROOM = 512 * MiB
LOCAL_BUFFER = 16 * MiB


def master_address(namespace: str, name: str) -> str:
    """What clients connect to. The name is resolved again on each reconnect, so a moved master is found."""
    return f"{names.master_name(name)}.{namespace}.svc:{names.PORT_MASTER_RPC}"


def store_children(namespace: str, name: str, owner: Object, spec: KVStoreSpec, settings: Settings) -> list[Object]:
    return [
        _master_service(namespace, name, owner),
        _master(namespace, name, owner, spec, settings),
        _stores_service(namespace, name, owner),
        _stores(namespace, name, owner, spec, settings),
    ]


def _labels(name: str, role: str) -> dict[str, str]:
    return {names.LABEL_STORE: name, names.LABEL_ROLE: role}


def _master_service(namespace: str, name: str, owner: Object) -> Object:
    labels = _labels(name, names.ROLE_MASTER)
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": common.metadata(names.master_name(name), namespace, labels, owner),
        "spec": {
            "clusterIP": "None",
            # The address is the pod's before it is ready: stores must find the master to make it ready.
            "publishNotReadyAddresses": True,
            "selector": labels,
            "ports": [
                {"name": "rpc", "port": names.PORT_MASTER_RPC, "targetPort": "rpc", "protocol": "TCP"},
                {"name": "http", "port": names.PORT_MASTER_HTTP, "targetPort": "http", "protocol": "TCP"},
            ],
        },
    }


def _master(namespace: str, name: str, owner: Object, spec: KVStoreSpec, settings: Settings) -> Object:
    labels = _labels(name, names.ROLE_MASTER)
    data = {"name": "data", "mountPath": "/data"}
    make_file = f"import os; p = {_TENANTS!r}; os.path.exists(p) or open(p, 'w').write({_NO_TENANTS!r})"
    lease = int(parse_duration(spec.master.lease_ttl) * 1000)
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": common.metadata(names.master_name(name), namespace, labels, owner),
        "spec": {
            "replicas": spec.master.replicas,
            # Two masters would each hold half of the truth.
            "strategy": {"type": "Recreate"},
            "selector": {"matchLabels": labels},
            "template": {
                "metadata": {"labels": {**labels, names.LABEL_MANAGED_BY: names.MANAGED_BY}},
                "spec": {
                    "automountServiceAccountToken": False,
                    "enableServiceLinks": False,
                    "securityContext": common.pod_security(),
                    "terminationGracePeriodSeconds": 15,
                    "initContainers": [
                        {
                            # The master exits when the file is missing, and rewrites it at each change of a tenant.
                            "name": "tenants",
                            "image": settings.store_image,
                            "imagePullPolicy": settings.image_pull_policy,
                            "command": ["python3", "-c", make_file],
                            "securityContext": common.container_security(),
                            "volumeMounts": [data],
                        }
                    ],
                    "containers": [
                        {
                            "name": "master",
                            "image": settings.store_image,
                            "imagePullPolicy": settings.image_pull_policy,
                            "command": ["mooncake_master"],
                            "args": [
                                "--rpc_address=0.0.0.0",
                                f"--rpc_port={names.PORT_MASTER_RPC}",
                                f"--metrics_port={names.PORT_MASTER_HTTP}",
                                "--enable_multi_tenants=true",
                                "--tenant_quota_connector_type=file",
                                f"--tenant_quota_connector_uri={_TENANTS}",
                                # A killed writer's unfinished put holds the deletion of its tenant for this long.
                                "--put_start_discard_timeout_sec=5",
                                "--put_start_release_timeout_sec=30",
                                f"--default_kv_lease_ttl={lease}",
                                f"--eviction_high_watermark_ratio={spec.master.eviction_high_watermark}",
                                "--logtostderr=1",
                            ],
                            "env": [common.env("HOME", "/tmp")],
                            "ports": [
                                {"name": "rpc", "containerPort": names.PORT_MASTER_RPC, "protocol": "TCP"},
                                {"name": "http", "containerPort": names.PORT_MASTER_HTTP, "protocol": "TCP"},
                            ],
                            "resources": common.resources(spec.master.resources, {"cpu": "50m", "memory": "256Mi"}),
                            "securityContext": common.container_security(),
                            "volumeMounts": [common.TMP_MOUNT, data],
                            "readinessProbe": {
                                "httpGet": {"path": "/health", "port": "http", "scheme": "HTTP"},
                                "periodSeconds": 2,
                                "timeoutSeconds": 5,
                                "failureThreshold": 3,
                            },
                            "livenessProbe": {
                                "httpGet": {"path": "/health", "port": "http", "scheme": "HTTP"},
                                "periodSeconds": 10,
                                "timeoutSeconds": 10,
                                "failureThreshold": 6,
                            },
                        }
                    ],
                    "volumes": [common.TMP_VOLUME, {"name": "data", "emptyDir": {}}],
                },
            },
        },
    }


def _stores_service(namespace: str, name: str, owner: Object) -> Object:
    labels = _labels(name, names.ROLE_STORE)
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": common.metadata(names.store_set_name(name), namespace, labels, owner),
        "spec": {
            "clusterIP": "None",
            "selector": labels,
            "ports": [{"name": "rest", "port": names.PORT_STORE_REST, "targetPort": "rest", "protocol": "TCP"}],
        },
    }


def _stores(namespace: str, name: str, owner: Object, spec: KVStoreSpec, settings: Settings) -> Object:
    labels = _labels(name, names.ROLE_STORE)
    segment = parse_bytes(spec.stores.segment_size)
    # The segment is filled page by page, so a limit that is too small would kill the pod only when the cache is full.
    memory = mebibytes(segment + STORE_HEADROOM)
    first, last = names.STORE_DATA_PORTS
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": common.metadata(names.store_set_name(name), namespace, labels, owner),
        "spec": {
            "replicas": spec.stores.replicas,
            "serviceName": names.store_set_name(name),
            "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": labels},
            "template": {
                "metadata": {"labels": {**labels, names.LABEL_MANAGED_BY: names.MANAGED_BY}},
                "spec": {
                    "automountServiceAccountToken": False,
                    "enableServiceLinks": False,
                    "securityContext": common.pod_security(),
                    "terminationGracePeriodSeconds": 15,
                    "containers": [
                        {
                            "name": "store",
                            "image": settings.store_image,
                            "imagePullPolicy": settings.image_pull_policy,
                            "command": ["mc_store_rest_server"],
                            "args": ["--port", str(names.PORT_STORE_REST)],
                            "env": [
                                common.field_env("MOONCAKE_LOCAL_HOSTNAME", "status.podIP"),
                                common.env("MOONCAKE_MASTER", master_address(namespace, name)),
                                common.env("MOONCAKE_TE_META_DATA_SERVER", "P2PHANDSHAKE"),
                                common.env("MOONCAKE_GLOBAL_SEGMENT_SIZE", str(segment)),
                                common.env("MOONCAKE_LOCAL_BUFFER_SIZE", str(LOCAL_BUFFER)),
                                common.env("MOONCAKE_PROTOCOL", spec.protocol),
                                common.env("MC_MIN_RPC_PORT", str(first)),
                                common.env("MC_MAX_RPC_PORT", str(last)),
                                common.env("HOME", "/tmp"),
                            ],
                            "ports": [
                                {"name": "rest", "containerPort": names.PORT_STORE_REST, "protocol": "TCP"},
                            ],
                            "resources": common.resources(
                                spec.stores.resources, {"cpu": "50m", "memory": memory}, {"memory": memory}
                            ),
                            "securityContext": common.container_security(),
                            "volumeMounts": [common.TMP_MOUNT],
                            "readinessProbe": {
                                "tcpSocket": {"port": "rest"},
                                "periodSeconds": 2,
                                "timeoutSeconds": 5,
                                "failureThreshold": 3,
                            },
                        }
                    ],
                    "volumes": [common.TMP_VOLUME],
                },
            },
        },
    }
