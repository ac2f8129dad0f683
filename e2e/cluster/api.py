"""The few questions that starting a cluster asks the API server, by plain HTTPS."""

from __future__ import annotations

import base64
import json
import ssl
import subprocess
import urllib.error
import urllib.request
from pathlib import Path

import yaml

from e2e.cluster.errors import ClusterError


class Api:
    """A reader of one API server, from a kubeconfig that holds a CA and a token."""

    def __init__(self, kubeconfig: Path) -> None:
        config = yaml.safe_load(kubeconfig.read_text())
        cluster = config["clusters"][0]["cluster"]
        ca = base64.b64decode(cluster["certificate-authority-data"]).decode()
        self._server = cluster["server"]
        self._token = config["users"][0]["user"]["token"]
        # No proxy: the address is on this machine, whatever the environment says.
        self._opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}),
            urllib.request.HTTPSHandler(context=ssl.create_default_context(cadata=ca)),
        )

    def get(self, path: str, timeout: float = 2.0) -> str | None:
        """The body of a GET, None while the server doesn't answer it with success."""
        request = urllib.request.Request(self._server + path, headers={"Authorization": f"Bearer {self._token}"})
        try:
            with self._opener.open(request, timeout=timeout) as answer:
                return answer.read().decode()
        except (OSError, urllib.error.HTTPError):
            return None

    def is_ready(self) -> bool:
        return self.get("/readyz") == "ok"

    def node_ready(self, name: str) -> str | None:
        """None if the node is Ready, else what its Ready condition says."""
        body = self.get(f"/api/v1/nodes/{name}")
        if body is None:
            return "the kubelet has not registered the node"
        for condition in json.loads(body)["status"].get("conditions", []):
            if condition["type"] == "Ready":
                return None if condition["status"] == "True" else condition["message"]
        return "the node has no Ready condition"

    def exists(self, path: str) -> bool:
        return self.get(path) is not None


def usable(kubectl: str, kubeconfig: str) -> bool:
    """Whether a cluster answers behind a kubeconfig."""
    command = [kubectl, "--kubeconfig", kubeconfig, "--request-timeout=5s", "get", "--raw", "/readyz"]
    return subprocess.run(command, capture_output=True).returncode == 0


def apply(kubectl: Path, kubeconfig: Path, manifest: Path) -> None:
    command = [str(kubectl), "--kubeconfig", str(kubeconfig), "apply", "--server-side", "-f", str(manifest)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise ClusterError(f"applying {manifest.name} failed: {done.stderr.strip()}")
