"""The gateway: smg with Kubernetes discovery, and the rights that it needs to watch the workers' pods."""

from __future__ import annotations

from moonpool_api import names
from moonpool_api.inference_service import InferenceServiceSpec, Resources

from moonpool_operator.clients.kube import Object
from moonpool_operator.plan.render import common
from moonpool_operator.settings import Settings


def gateway_children(
    namespace: str, name: str, owner: Object, spec: InferenceServiceSpec, settings: Settings
) -> list[Object]:
    labels = {names.LABEL_SERVICE: name, names.LABEL_ROLE: names.ROLE_GATEWAY}
    child = names.gateway_name(name)

    def metadata() -> Object:
        return common.metadata(child, namespace, labels, owner)

    rbac = "rbac.authorization.k8s.io"
    return [
        {
            "apiVersion": "v1",
            "kind": "ServiceAccount",
            "metadata": metadata(),
            "automountServiceAccountToken": False,
        },
        {
            "apiVersion": f"{rbac}/v1",
            "kind": "Role",
            "metadata": metadata(),
            "rules": [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}],
        },
        {
            "apiVersion": f"{rbac}/v1",
            "kind": "RoleBinding",
            "metadata": metadata(),
            "roleRef": {"apiGroup": rbac, "kind": "Role", "name": child},
            "subjects": [{"kind": "ServiceAccount", "name": child, "namespace": namespace}],
        },
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": metadata(),
            "spec": {
                "selector": labels,
                "ports": [{"name": "http", "port": names.PORT_GATEWAY, "targetPort": "http", "protocol": "TCP"}],
            },
        },
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": metadata(),
            "spec": {
                "replicas": spec.gateway.replicas,
                "selector": {"matchLabels": labels},
                # A gateway that is replaced must have its successor first: it is the only way in.
                "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
                "template": {
                    "metadata": {"labels": {**labels, names.LABEL_MANAGED_BY: names.MANAGED_BY}},
                    "spec": _pod(namespace, name, child, spec, settings),
                },
            },
        },
    ]


def _pod(namespace: str, name: str, account: str, spec: InferenceServiceSpec, settings: Settings) -> Object:
    return {
        "serviceAccountName": account,
        "automountServiceAccountToken": True,
        "enableServiceLinks": False,
        "securityContext": common.pod_security(),
        "terminationGracePeriodSeconds": 90,
        "containers": [
            {
                "name": "gateway",
                "image": settings.gateway_image,
                "imagePullPolicy": settings.image_pull_policy,
                "command": ["smg"],
                "args": _arguments(namespace, name, spec),
                "env": [common.env("HOME", "/tmp")],
                "ports": [
                    {"name": "http", "containerPort": names.PORT_GATEWAY, "protocol": "TCP"},
                    {"name": "metrics", "containerPort": names.PORT_GATEWAY_METRICS, "protocol": "TCP"},
                ],
                "resources": common.resources(Resources(), {"cpu": "50m", "memory": "128Mi"}),
                "securityContext": common.container_security(),
                "volumeMounts": [common.TMP_MOUNT],
                "startupProbe": _probe("/health", 1, 60),
                "livenessProbe": _probe("/health", 10, 6),
                # Not /readiness, which is 503 without workers: the gateway must be reachable to say so itself.
                "readinessProbe": _probe("/health", 2, 2),
                # Endpoints are updated after the pod begins to end; keep answering meanwhile.
                "lifecycle": {"preStop": {"sleep": {"seconds": 5}}},
            }
        ],
        "volumes": [common.TMP_VOLUME],
    }


def _arguments(namespace: str, name: str, spec: InferenceServiceSpec) -> list[str]:
    """Measured (reference smg-gateway.md): the defaults of health checks (60 s) and breaker (60 s) are far too slow."""
    return [
        "launch",
        "--host", "0.0.0.0", "--port", str(names.PORT_GATEWAY),
        "--prometheus-host", "0.0.0.0", "--prometheus-port", str(names.PORT_GATEWAY_METRICS),
        "--policy", spec.gateway.policy,
        "--service-discovery",
        "--selector", f"{names.LABEL_SERVICE}={name}", f"{names.LABEL_ROLE}={names.ROLE_WORKER}",
        "--service-discovery-namespace", namespace,
        "--service-discovery-port", str(names.PORT_WORKER),
        "--health-check-interval-secs", "2",
        "--health-check-timeout-secs", "5",
        "--health-failure-threshold", "3",
        "--health-success-threshold", "1",
        "--retry-max-retries", "5",
        "--retry-initial-backoff-ms", "50",
        "--retry-max-backoff-ms", "1000",
        "--cb-failure-threshold", "5",
        "--cb-success-threshold", "1",
        "--cb-timeout-duration-secs", "5",
        "--cb-window-duration-secs", "30",
        "--worker-startup-check-interval", "1",
        "--shutdown-grace-period-secs", "75",
        "--disable-tokenizer-autoload",
        # One line per request would be most of what this pod does; the metrics count them.
        "--log-level", "warn",
    ]  # fmt: skip


def _probe(path: str, period: int, failures: int) -> Object:
    return {
        "httpGet": {"path": path, "port": "http", "scheme": "HTTP"},
        "periodSeconds": period,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }
