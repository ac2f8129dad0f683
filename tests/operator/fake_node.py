"""A node for tests: it makes the pods of a real API server "run" as asyncio servers and real Mooncake processes.

Each pod gets a loopback address of its own, so everything listens on its real port. What is faked is the kubelet
(status, probes, grace), the worker (it reports, takes grants, computes nothing) and the gateway (it lists ready
workers). The API server, its controllers and Mooncake are real.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from moonpool_api import names
from moonpool_api.geometry import full_attention
from moonpool_api.namespace import NamespaceInputs, RopeInputs, namespace_hash
from moonpool_operator.clients.kube import ApiError, KubeClient, Object

BIN = Path(sys.executable).parent
Handler = Callable[[str, str, dict], tuple[int, object]]
NODE = "fake"


async def serve(ip: str, port: int, handler: Handler) -> asyncio.Server:
    """A tiny HTTP server: ``handler(method, path, body)`` gives (status, JSON)."""

    async def connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while line := await reader.readline():
                method, target, _ = line.decode().split(" ", 2)
                length = 0
                while (header := (await reader.readline()).decode().strip()) != "":
                    if header.lower().startswith("content-length:"):
                        length = int(header.split(":")[1])
                text = await reader.readexactly(length) if length else b"{}"
                status, body = handler(method, target.split("?")[0], json.loads(text))
                payload = json.dumps(body).encode()
                head = (
                    f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(payload)}\r\n\r\n"
                )
                writer.write(head.encode() + payload)
                await writer.drain()
        writer.close()

    return await asyncio.start_server(connection, ip, port)


def option(arguments: list[str], name: str, default: str = "") -> str:
    return arguments[arguments.index(name) + 1] if name in arguments else default


@dataclass
class FakePod:
    name: str
    ip: str
    role: str
    arguments: list[str] = field(default_factory=list)
    annotations: dict[str, str] = field(default_factory=dict)
    server: asyncio.Server | None = None
    processes: list[asyncio.subprocess.Process] = field(default_factory=list)
    ready: bool = False
    restarts: int = 0
    digest: str = ""
    loaded: bool = False
    message: str = ""
    tenant: str = ""
    grants: list[dict] = field(default_factory=list)
    ending: asyncio.Task | None = None

    def inputs(self) -> NamespaceInputs:
        dtype = option(self.arguments, "--dtype")
        backend = option(self.arguments, "--attention-backend")
        dtype = "float32" if dtype == "auto" else dtype
        geometry = full_attention(
            layers=2,
            kv_heads=1,
            head_dim=8,
            dtype=dtype,
            prefix_granularity=int(option(self.arguments, "--prefix-granularity")),
        )
        return NamespaceInputs(
            architecture="llama",
            weights_digest=self.digest,
            weight_version=option(self.arguments, "--weight-version"),
            dtype=dtype,
            attention_backend="torch" if backend == "auto" else backend,
            rope=RopeInputs(theta=10000.0),
            geometry=geometry,
            isolation=option(self.arguments, "--isolation"),
        )

    @property
    def namespace(self) -> str:
        return namespace_hash(self.inputs())

    @property
    def worker_ready(self) -> bool:
        return self.loaded and self.annotations.get(names.ANNOTATION_VERIFIED_NAMESPACE) == self.namespace

    def worker(self, method: str, path: str, body: dict) -> tuple[int, object]:
        if not self.loaded:
            return 503, {"state": "loading"}
        if path == "/v1/cache/grant":
            self.grants.append(body)
            if body["namespace"] != self.namespace:
                return 409, {"error": "not this process's namespace"}
            self.tenant = body["tenant"]
            return 200, {"l3": {}}
        return 200, {
            "namespace": self.namespace,
            "inputs": self.inputs().model_dump(mode="json"),
            "weights_digest": self.digest,
            "boot": f"{self.name}/{self.restarts}",
            "l3": {"state": "open" if self.tenant else "closed", "tenant": self.tenant, "master": "", "error": ""},
            "capacity": {"bytes_per_token": 256, "l1_tokens": 1000, "l2_tokens": 2000},
        }


class FakeNode:
    """Runs the pods of one namespace. ``digest`` is what a worker that loads now finds in its volume."""

    def __init__(self, kube: KubeClient, namespace: str, folder: Path) -> None:
        self.kube, self.namespace, self.folder = kube, namespace, folder
        self.pods: dict[str, FakePod] = {}
        self.digest = "sha256:" + "a" * 64
        self.load_seconds, self.drain_seconds = 0.2, 0.5
        #: What a worker says when it can't start ("" = it can).
        self.start_error = ""
        self.routing = True
        self._octet, self._next = random.randint(10, 250), 1
        self._stop = False
        #: Largest number of worker pods seen at once, and the smallest number of routable ones since `watch_floor`.
        self.most_workers = 0
        self.fewest_available: int | None = None

    def address(self) -> str:
        self._next += 1
        return f"127.{self._octet}.{self._next // 250}.{self._next % 250 + 1}"

    def workers(self) -> list[FakePod]:
        return [pod for pod in self.pods.values() if pod.role == names.ROLE_WORKER]

    def routable(self) -> list[FakePod]:
        return [pod for pod in self.workers() if pod.ready and pod.ending is None]

    async def run(self) -> None:
        while not self._stop:
            with contextlib.suppress(ApiError):
                await self._step()
            await asyncio.sleep(0.1)

    async def stop(self) -> None:
        self._stop = True
        for pod in list(self.pods.values()):
            await self._end_processes(pod)

    async def _step(self) -> None:
        live = {pod["metadata"]["name"]: pod for pod in await self.kube.list("Pod", self.namespace)}
        for name in self.pods.keys() - live.keys():
            await self._end_processes(self.pods.pop(name))
        for name, pod in live.items():
            fake = self.pods.get(name)
            if fake is None:
                if not pod["metadata"].get("deletionTimestamp"):
                    await self._start(pod)
                continue
            fake.annotations = pod["metadata"].get("annotations") or {}
            if pod["metadata"].get("deletionTimestamp") and fake.ending is None:
                fake.ending = asyncio.create_task(self._finish(fake))
            await self._report(fake, pod)
        workers = [p for p in live.values() if p["metadata"]["labels"].get(names.LABEL_ROLE) == names.ROLE_WORKER]
        self.most_workers = max(self.most_workers, len(workers))
        if self.fewest_available is not None:
            self.fewest_available = min(self.fewest_available, len(self.routable()))

    async def _start(self, pod: Object) -> None:
        name, labels = pod["metadata"]["name"], pod["metadata"]["labels"]
        if not pod["spec"].get("nodeName"):
            binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name}, "target": {"name": NODE}}
            binding["target"] = {"apiVersion": "v1", "kind": "Node", "name": NODE}
            path = f"/api/v1/namespaces/{self.namespace}/pods/{name}/binding"
            await self.kube._write("POST", path, binding, "application/json", {})
        container = pod["spec"]["containers"][0]
        fake = FakePod(name, self.address(), labels.get(names.LABEL_ROLE, ""), container.get("args", []))
        self.pods[name] = fake
        if fake.role == names.ROLE_WORKER:
            fake.message = self.start_error
            fake.server = await serve(fake.ip, names.PORT_WORKER, fake.worker)
            if not fake.message:
                asyncio.get_running_loop().call_later(self.load_seconds, self.load, fake)
        elif fake.role == names.ROLE_GATEWAY:
            fake.server = await serve(fake.ip, names.PORT_GATEWAY, self._gateway)
            fake.ready = True
        elif fake.role == names.ROLE_MASTER:
            await self.start_master(fake)
        elif fake.role == names.ROLE_STORE:
            asyncio.create_task(self._start_store(fake, container))  # noqa: RUF006

    def load(self, fake: FakePod) -> None:
        fake.digest, fake.loaded = self.digest, True

    def restart(self, fake: FakePod) -> None:
        """The container dies and comes back; it reads whatever the volume holds now."""
        fake.loaded, fake.ready, fake.tenant = False, False, ""
        fake.restarts += 1
        asyncio.get_running_loop().call_later(self.load_seconds, self.load, fake)

    def _gateway(self, method: str, path: str, body: dict) -> tuple[int, object]:
        listed = self.routable() if self.routing else []
        workers = [{"url": f"http://{pod.ip}:8000", "is_healthy": True, "status": "ready"} for pod in listed]
        return 200, {"workers": workers, "total": len(workers)}

    async def start_master(self, fake: FakePod) -> None:
        tenants = self.folder / f"{fake.name}.yaml"
        if not tenants.exists():
            tenants.write_text("version: 1\ntenants: []\n")
        arguments = [
            *(a for a in fake.arguments if not a.startswith(("--rpc_address", "--tenant_quota_connector_uri"))),
            f"--rpc_address={fake.ip}",
            f"--metrics_host={fake.ip}",
            f"--tenant_quota_connector_uri={tenants}",
            "--client_ttl=10",
        ]
        arguments = [a.replace("release_timeout_sec=30", "release_timeout_sec=6") for a in arguments]
        await self._run(fake, "mooncake_master", arguments, {})
        fake.ready = True

    async def _start_store(self, fake: FakePod, container: Object) -> None:
        while not (masters := [p for p in self.pods.values() if p.role == names.ROLE_MASTER and p.ready]):  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        env = {item["name"]: item.get("value", "") for item in container.get("env", [])}
        env |= {
            "MOONCAKE_LOCAL_HOSTNAME": fake.ip,
            "MOONCAKE_MASTER": f"{masters[0].ip}:{names.PORT_MASTER_RPC}",
            "HOME": os.environ.get("HOME", "/tmp"),
        }
        await self._run(fake, "mc_store_rest_server", ["--port", str(random.randint(20000, 29999))], env)
        fake.ready = True

    async def _run(self, fake: FakePod, program: str, arguments: list[str], env: dict[str, str]) -> None:
        log = (self.folder / f"{fake.name}.log").open("ab")
        environment = os.environ | {"GLOG_logtostderr": "1"} | env
        fake.processes.append(
            await asyncio.create_subprocess_exec(
                str(BIN / program), *arguments, stdout=log, stderr=log, stdin=asyncio.subprocess.DEVNULL,
                env=environment,
            )
        )  # fmt: skip

    async def _finish(self, fake: FakePod) -> None:
        """Drain, then tell the API server that the pod is gone."""
        if fake.role == names.ROLE_WORKER:
            await asyncio.sleep(self.drain_seconds)
        await self._end_processes(fake)
        with contextlib.suppress(ApiError):
            path = f"/api/v1/namespaces/{self.namespace}/pods/{fake.name}"
            await self.kube._write("DELETE", path, {"gracePeriodSeconds": 0}, "application/json", {})

    async def _end_processes(self, fake: FakePod) -> None:
        if fake.server is not None:
            fake.server.close()
        for process in fake.processes:
            if process.returncode is None:
                process.kill()
                await process.wait()
        fake.processes.clear()

    async def _report(self, fake: FakePod, pod: Object) -> None:
        """The pod's status as a kubelet writes it, when it changed."""
        status = pod.get("status", {})
        conditions = {c["type"]: c["status"] for c in status.get("conditions", [])}
        container_ready = fake.worker_ready if fake.role == names.ROLE_WORKER else fake.ready
        gates = pod["spec"].get("readinessGates", [])
        gated = all(conditions.get(gate["conditionType"]) == "True" for gate in gates)
        ready = container_ready and gated and not fake.message and fake.ending is None
        if fake.role == names.ROLE_WORKER:
            fake.ready = ready
        now = (status.get("podIP"), conditions.get("Ready"), restarts_of(status), words_of(status))
        wanted = (fake.ip, "True" if ready else "False", fake.restarts, fake.message)
        if now == wanted:
            return
        container: Object = {
            "name": pod["spec"]["containers"][0]["name"],
            "image": "fake",
            "imageID": "fake",
            "ready": ready,
            "restartCount": fake.restarts,
            "state": {"running": {}},
        }
        if fake.message:
            container["state"] = {"waiting": {"reason": "CrashLoopBackOff"}}
            container["lastState"] = {"terminated": {"exitCode": 2, "message": fake.message}}
        patch = {
            "status": {
                "phase": "Running",
                "podIP": fake.ip,
                "podIPs": [{"ip": fake.ip}],
                "containerStatuses": [container],
                "conditions": [{"type": "Ready", "status": wanted[1]}, {"type": "PodScheduled", "status": "True"}],
            }
        }
        await self.kube.patch_pod_status(self.namespace, fake.name, patch)


def restarts_of(status: Object) -> int:
    return sum(c.get("restartCount", 0) for c in status.get("containerStatuses", []))


def words_of(status: Object) -> str:
    for container in status.get("containerStatuses", []):
        return container.get("lastState", {}).get("terminated", {}).get("message", "")
    return ""


def scratch() -> Path:
    return Path(tempfile.mkdtemp(prefix="moonpool-fake-"))
