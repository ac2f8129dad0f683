"""A namespace of the cluster with Moonpool's resources in it, driven with kubectl as a user would."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import yaml

from e2e.cluster import Cluster

ROOT = Path(__file__).parents[1]
OPERATOR_NAMESPACE = "moonpool-system"
WEIGHTS_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


class KubectlError(RuntimeError):
    """kubectl's own words."""


class NotReached(AssertionError):
    """What was waited for did not come; the message says what was seen last."""


class Kubectl:
    """kubectl bound to a cluster and a namespace."""

    def __init__(self, cluster: Cluster, namespace: str = "") -> None:
        self.cluster, self.namespace = cluster, namespace

    def command(self, *args: str) -> list[str]:
        base = [str(self.cluster.kubectl), "--kubeconfig", str(self.cluster.kubeconfig)]
        return [*base, *(["--namespace", self.namespace] if self.namespace else []), *args]

    def run(self, *args: str, stdin: str | None = None, check: bool = True, timeout: float = 120) -> str:
        done = subprocess.run(self.command(*args), input=stdin, capture_output=True, text=True, timeout=timeout)
        if check and done.returncode != 0:
            raise KubectlError(f"kubectl {' '.join(args)}: {done.stderr.strip()}")
        return done.stdout if done.returncode == 0 else done.stdout + done.stderr

    def get(self, *what: str) -> dict:
        return json.loads(self.run("get", *what, "-o", "json"))

    def find(self, *what: str) -> dict | None:
        """The object, or None when there is none (or the API server does not answer just now)."""
        try:
            return self.get(*what)
        except (KubectlError, subprocess.TimeoutExpired):
            return None

    def apply(self, manifest: str | dict | list[dict]) -> str:
        if isinstance(manifest, str):
            text = manifest
        else:
            text = yaml.safe_dump_all(manifest if isinstance(manifest, list) else [manifest])
        return self.run("apply", "-f", "-", stdin=text)


class Fleet(Kubectl):
    """One Kubernetes namespace with an InferenceService and what belongs to it."""

    def create_namespace(self) -> None:
        namespace = {
            "apiVersion": "v1",
            "kind": "Namespace",
            "metadata": {
                "name": self.namespace,
                "labels": {"pod-security.kubernetes.io/enforce": "restricted"},
            },
        }
        self.apply(namespace)

    def delete_namespace(self, timeout: float = 180) -> None:
        self.run("delete", "namespace", self.namespace, f"--timeout={timeout:.0f}s", check=False, timeout=timeout + 10)

    def weights_folder(self) -> Path:
        folder = Path(self.cluster.volumes_dir) / self.namespace
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o755)
        return folder

    def create_weights_volume(self, source: Path) -> None:
        """A local PersistentVolume that holds the weights file, and the claim ``weights`` on it."""
        target = self.weights_folder() / WEIGHTS_FILE
        replace_file(source, target)
        volume = f"weights-{self.namespace}"
        size = {"storage": "1Gi"}
        self.apply(
            [
                {
                    "apiVersion": "v1",
                    "kind": "PersistentVolume",
                    "metadata": {"name": volume},
                    "spec": {
                        "capacity": size,
                        "accessModes": ["ReadOnlyMany", "ReadWriteOnce"],
                        "persistentVolumeReclaimPolicy": "Retain",
                        "storageClassName": "",
                        "claimRef": {"name": "weights", "namespace": self.namespace},
                        "hostPath": {"path": str(self.weights_folder())},
                    },
                },
                {
                    "apiVersion": "v1",
                    "kind": "PersistentVolumeClaim",
                    "metadata": {"name": "weights"},
                    "spec": {
                        "accessModes": ["ReadOnlyMany"],
                        "storageClassName": "",
                        "volumeName": volume,
                        "resources": {"requests": size},
                    },
                },
            ]
        )

    # --- looking ---------------------------------------------------------------------------------------------

    def service(self, name: str = "chat") -> dict:
        return self.get("inferenceservice", name)

    def condition(self, kind: str, what: str = "inferenceservice/chat") -> dict:
        found = self.find(what) or {}
        conditions = found.get("status", {}).get("conditions", [])
        return next((c for c in conditions if c["type"] == kind), {"type": kind, "status": "Absent"})

    def workers(self, name: str = "chat") -> list[dict]:
        selector = f"moonpool.dev/service={name},moonpool.dev/role=worker"
        return (self.find("pods", "-l", selector) or {"items": []})["items"]

    def worker_metrics(self, name: str = "chat") -> dict[str, float]:
        """Samples of the first worker, by name and labels, as Prometheus would scrape them (by port-forward)."""
        pod = self.workers(name)[0]["metadata"]["name"]
        with self.forward(f"pod/{pod}", 8000) as url:
            text = httpx.get(f"{url}/metrics", timeout=10).text
        samples = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
        return {sample: float(value) for sample, _, value in samples}

    def wait(self, what: str, test: Callable[[], object], timeout: float, interval: float = 0.5) -> float:
        """Seconds until ``test`` was true; NotReached with the fleet's state after ``timeout`` seconds."""
        begin = time.monotonic()
        while not test():
            if time.monotonic() - begin > timeout:
                raise NotReached(f"{what}: not within {timeout:.0f} s\n{self.describe()}")
            time.sleep(interval)
        return time.monotonic() - begin

    def wait_condition(
        self, kind: str, status: str = "True", timeout: float = 180, what: str = "inferenceservice/chat"
    ) -> float:
        def reached() -> bool:
            found = self.find(what) or {}
            generation = found.get("metadata", {}).get("generation")
            return any(
                c["type"] == kind and c["status"] == status and c.get("observedGeneration") == generation
                for c in found.get("status", {}).get("conditions", [])
            )

        return self.wait(f"{what}: {kind}={status}", reached, timeout)

    def describe(self) -> str:
        """What a person would look at first when something did not happen."""
        parts = [self.run("get", "inferenceservices,kvstores,replicasets,pods", "-o", "wide", check=False)]
        for what in ("inferenceservices", "kvstores"):
            for item in (self.find(what) or {"items": []})["items"]:
                for c in item.get("status", {}).get("conditions", []):
                    line = f"{item['kind']}/{item['metadata']['name']} {c['type']}={c['status']} {c.get('reason', '')}"
                    parts.append(f"{line}: {c.get('message', '')}")
        operator = Kubectl(self.cluster, OPERATOR_NAMESPACE)
        parts.append(operator.run("logs", "deployment/moonpool-operator", "--tail=30", check=False))
        return "\n".join(parts)

    # --- talking ---------------------------------------------------------------------------------------------

    @contextmanager
    def reach(self, service: str, port: int) -> Iterator[str]:
        """A URL on which the host reaches a Service: its cluster IP on the embedded cluster, else a port-forward."""
        if self.cluster.embedded:
            address = self.get("service", service)["spec"]["clusterIP"]
            yield f"http://{address}:{port}"
            return
        with self.forward(f"service/{service}", port) as url:
            yield url

    @contextmanager
    def forward(self, target: str, port: int) -> Iterator[str]:
        """A URL on this host that leads to a pod's or a Service's port."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            local = probe.getsockname()[1]
        command = self.command("port-forward", target, f"{local}:{port}")
        forward = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        try:
            assert forward.stdout is not None
            forward.stdout.readline()
            yield f"http://127.0.0.1:{local}"
        finally:
            forward.terminate()
            forward.wait()

    def gateway(self, name: str = "chat"):
        return self.reach(f"{name}-gateway", 8080)


def replace_file(source: Path, target: Path) -> None:
    """Copy, then rename: a reader of the old file keeps it whole."""
    partial = target.with_suffix(".partial")
    partial.write_bytes(source.read_bytes())
    partial.chmod(0o644)
    os.replace(partial, target)


def install_operator(cluster: Cluster) -> None:
    """CRDs and operator, as ``kubectl apply -f`` would; waits until the operator is available."""
    kubectl = Kubectl(cluster)
    kubectl.run("apply", "--server-side", "-f", str(ROOT / "crds"))
    kubectl.run("apply", "--server-side", "-f", str(ROOT / "operator" / "deploy" / "operator.yaml"))
    operator = Kubectl(cluster, OPERATOR_NAMESPACE)
    # The tag stays the same when the code changes.
    operator.run("rollout", "restart", "deployment/moonpool-operator")
    operator.run("rollout", "status", "deployment/moonpool-operator", "--timeout=180s", timeout=200)
