"""A real kube-apiserver over a real etcd on loopback, for tests of what only the API server decides.

Uses the binaries that the embedded cluster built (``~/.cache/moonpool/bin``); :func:`binaries` says why when there
are none.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_TOKEN = "test-admin"


def binaries() -> Path | None:
    """The folder of the newest cached Kubernetes build, or None."""
    cache = Path(os.environ.get("MOONPOOL_CACHE", Path.home() / ".cache" / "moonpool")) / "bin"
    builds = sorted(cache.glob("kubernetes-v*/kube-apiserver"))
    return builds[-1].parent if builds else None


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(frozen=True)
class ApiServer:
    url: str
    kubeconfig: Path
    bin: Path

    def request(self, method: str, path: str, body: object | None = None, content_type: str = "application/json"):
        """(HTTP status, parsed answer)"""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data=data, method=method)
        request.add_header("Authorization", f"Bearer {_TOKEN}")
        request.add_header("Content-Type", content_type)
        context = ssl._create_unverified_context()
        try:
            with urllib.request.urlopen(request, context=context, timeout=10) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as refusal:
            text = refusal.read().decode()
            return refusal.code, json.loads(text) if text.startswith("{") else text

    def kubectl(self, *args: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
        command = [str(self.bin / "kubectl"), "--kubeconfig", str(self.kubeconfig), *args]
        return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=60)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _kubeconfig(url: str) -> str:
    return json.dumps(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "test", "cluster": {"server": url, "insecure-skip-tls-verify": True}}],
            "users": [{"name": "admin", "user": {"token": _TOKEN}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "admin"}}],
            "current-context": "test",
        }
    )


@contextlib.contextmanager
def running_api_server(folder: Path, controllers: bool = False) -> Iterator[ApiServer]:
    """Start etcd and kube-apiserver (and, if asked, kube-controller-manager) with their state in ``folder``.

    Raises RuntimeError with the log's end when the API server is not ready within a minute.
    """
    bin_dir = binaries()
    if bin_dir is None:
        raise RuntimeError("no Kubernetes binaries are cached: run `uv run python -m e2e.cluster up` once")
    etcd_port, peer_port, port = free_port(), free_port(), free_port()
    etcd_url, url = f"http://127.0.0.1:{etcd_port}", f"https://127.0.0.1:{port}"
    (folder / "tokens.csv").write_text(f'{_TOKEN},admin,admin,"system:masters"\n')
    key = folder / "sa.key"
    subprocess.run(["openssl", "genrsa", "-out", str(key), "2048"], check=True, capture_output=True)
    etcd_name = "etcd" if (bin_dir / "etcd").exists() else "server"
    etcd = [
        str(bin_dir / etcd_name), "--data-dir", str(folder / "etcd"), "--unsafe-no-fsync",
        "--listen-client-urls", etcd_url, "--advertise-client-urls", etcd_url,
        "--listen-peer-urls", f"http://127.0.0.1:{peer_port}",
        "--initial-advertise-peer-urls", f"http://127.0.0.1:{peer_port}",
        "--initial-cluster", f"default=http://127.0.0.1:{peer_port}",
    ]  # fmt: skip
    api = [
        str(bin_dir / "kube-apiserver"), f"--etcd-servers={etcd_url}", f"--secure-port={port}",
        "--bind-address=127.0.0.1", f"--cert-dir={folder / 'certs'}", f"--token-auth-file={folder / 'tokens.csv'}",
        "--authorization-mode=RBAC", "--service-cluster-ip-range=10.96.0.0/16",
        "--service-account-issuer=https://kubernetes.default.svc", f"--service-account-signing-key-file={key}",
        f"--service-account-key-file={key}",
    ]  # fmt: skip
    kubeconfig = folder / "kubeconfig"
    kubeconfig.write_text(_kubeconfig(url))
    with contextlib.ExitStack() as stack:

        def start(name: str, command: list[str]) -> subprocess.Popen[bytes]:
            log = stack.enter_context((folder / f"{name}.log").open("wb"))
            process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
            stack.callback(_stop, process)
            return process

        start("etcd", etcd)
        process = start("apiserver", api)
        server = ApiServer(url, kubeconfig, bin_dir)
        _wait_ready(server, process, folder / "apiserver.log")
        if controllers:
            start(
                "controllers",
                [
                    str(bin_dir / "kube-controller-manager"),
                    f"--kubeconfig={kubeconfig}",
                    "--leader-elect=false",
                    f"--service-account-private-key-file={key}",
                    "--secure-port=0",
                ],
            )
        yield server


def _wait_ready(server: ApiServer, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError):
            if server.request("GET", "/api/v1/namespaces/default")[0] == 200:
                return
        time.sleep(0.2)
    raise RuntimeError(f"kube-apiserver did not become ready; the end of its log:\n{log.read_text()[-2000:]}")
