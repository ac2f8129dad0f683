"""The whole operator, as a process, against a real API server, its controllers and a real Mooncake.

Each scenario has a namespace, a node and an operator of its own. They mostly wait, so four run at a time; the test of
a scenario waits for its end.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio
from kubernetes.aio import config as kubernetes_config
from kubernetes.aio.client.configuration import Configuration
from moonpool_api import names
from moonpool_operator.clients.kube import ApiError, KubeClient, Object

from tests.api_server import ApiServer, binaries, running_api_server
from tests.operator.fake_node import NODE, FakeNode

pytestmark = [
    pytest.mark.skipif(binaries() is None, reason="no cached Kubernetes: `uv run python -m e2e.cluster up`"),
    pytest.mark.mooncake,
]
ROOT = Path(__file__).parents[2]
MANAGER = names.FIELD_MANAGER
WRITER = Path(__file__).parent / "writer.py"


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    with running_api_server(tmp_path_factory.mktemp("api"), controllers=True) as server:
        applied = server.kubectl("apply", "--server-side", "-f", str(ROOT / "crds"))
        assert applied.returncode == 0, applied.stderr
        server.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=30s")
        node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE}}
        server.request("POST", "/api/v1/nodes", node)
        yield server


class Operator:
    """The operator's process."""

    def __init__(self, api: ApiServer, namespace: str, log: Path) -> None:
        self._api, self._namespace, self.log = api, namespace, log
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "moonpool_operator", "--namespace", self._namespace]
        environment = os.environ | {"KUBECONFIG": str(self._api.kubeconfig), "MOONPOOL_POD_CALL_TIMEOUT": "1"}
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*command, "--metrics-port", "0", "--health-port", "0"], env=environment, stdout=log, stderr=log
            )

    def kill(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self._process = None

    def rss_mib(self) -> float:
        assert self._process is not None
        pages = int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1])
        return pages * 4096 / (1 << 20)


@dataclass
class World:
    """One namespace with its node and operator, and a user who looks at it."""

    kube: KubeClient
    namespace: str
    node: FakeNode
    operator: Operator

    async def service(self) -> Object:
        return await self.kube.get(names.INFERENCE_SERVICE, self.namespace, "chat") or {}

    async def store(self) -> Object:
        return await self.kube.get(names.KV_STORE, self.namespace, "kv") or {}

    async def edit(self, **spec: object) -> None:
        await self.kube.merge(names.INFERENCE_SERVICE, self.namespace, "chat", {"spec": spec})

    async def condition(self, kind: str) -> tuple[str, str, str]:
        live = await self.service()
        for condition in live.get("status", {}).get("conditions", []):
            if condition["type"] == kind and condition["observedGeneration"] == live["metadata"]["generation"]:
                return condition["status"], condition["reason"], condition["message"]
        return "", "", ""

    async def until(self, what: str, test: Callable, seconds: float = 60.0):
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            with contextlib.suppress(ApiError, KeyError, IndexError):
                if result := await test():
                    return result
            await asyncio.sleep(0.1)
        import json

        state = json.dumps([(await self.service()).get("status"), (await self.store()).get("status")], indent=1)
        raise AssertionError(f"{what}: not in {seconds} s\n{state}\n{self.operator.log.read_text()[-6000:]}")

    async def is_true(self, *kinds: str) -> bool:
        return all([(await self.condition(kind))[0] == "True" for kind in kinds])

    async def settled(self) -> bool:
        return await self.is_true("Ready", "RolloutComplete", "L3Flushed", "CacheReady")

    async def write_objects(self, tenant: str, count: int = 20, size: int = 1 << 16) -> str:
        master = next(pod for pod in self.node.pods.values() if pod.role == names.ROLE_MASTER)
        process = await asyncio.create_subprocess_exec(
            sys.executable, str(WRITER), f"{master.ip}:{names.PORT_MASTER_RPC}", tenant, str(count), str(size),
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        out, _ = await process.communicate()
        return out.decode().strip().splitlines()[-1]


def kv_store() -> Object:
    return {
        "apiVersion": names.API_VERSION,
        "kind": names.KV_STORE,
        "metadata": {"name": "kv"},
        "spec": {"stores": {"segmentSize": "64Mi"}},
    }


def chat(**edits: object) -> Object:
    spec: Object = {
        "model": {"source": {"persistentVolumeClaim": {"claimName": "weights", "path": "w.gguf"}}},
        "weightVersion": "v1",
        "replicas": 2,
        "cache": {"l1": {"size": "64Mi"}, "l3": {"kvStoreRef": {"name": "kv"}}},
        "rollout": {"bake": "2s", "drainTimeout": "2s"},
        **edits,
    }
    return {
        "apiVersion": names.API_VERSION,
        "kind": names.INFERENCE_SERVICE,
        "metadata": {"name": "chat"},
        "spec": spec,
    }


Scenario = Callable[[World], Coroutine[None, None, None]]
SCENARIOS: dict[str, Scenario] = {}
AT_ONCE = 4


def scenario(function: Scenario) -> Scenario:
    SCENARIOS[function.__name__] = function
    return function


async def play(api: ApiServer, number: int, function: Scenario, folder: Path, slots: asyncio.Semaphore) -> None:
    configuration = Configuration()
    await kubernetes_config.load_kube_config(config_file=str(api.kubeconfig), client_configuration=configuration)
    async with slots:
        kube, namespace = KubeClient(configuration), f"scenario-{number}"
        await kube.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}})
        node = FakeNode(kube, namespace, folder)
        running = asyncio.create_task(node.run())
        operator = Operator(api, namespace, folder / "operator.log")
        operator.start()
        try:
            await function(World(kube, namespace, node, operator))
        finally:
            operator.kill()
            await node.stop()
            running.cancel()
            await kube.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def playing(
    api: ApiServer, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[dict[str, asyncio.Task[None]]]:
    """The scenarios that were selected, all under way."""
    slots = asyncio.Semaphore(AT_ONCE)
    selected = [item.callspec.params["name"] for item in request.session.items if item.path == Path(__file__)]
    tasks = {
        name: asyncio.create_task(play(api, number, SCENARIOS[name], tmp_path_factory.mktemp(f"s{number}"), slots))
        for number, name in enumerate(selected)
    }
    yield tasks
    for task in tasks.values():
        task.cancel()
    await asyncio.gather(*tasks.values(), return_exceptions=True)


async def deploy(world: World, **edits: object) -> None:
    for manifest in (kv_store(), chat(**edits)):
        manifest["metadata"]["namespace"] = world.namespace
        await world.kube.create(manifest)
    await world.until("deployed", world.settled, 90)


async def claims(world: World) -> list[dict]:
    return (await world.service())["status"]["kvNamespaces"]


@scenario
async def an_edit_of_the_weights_rolls_and_proves_its_flush(world: World) -> None:
    await deploy(world)
    first = (await claims(world))[0]
    assert first["state"] == "Active" and first["tenant"].endswith("-0")
    assert await world.write_objects(first["tenant"]) == "0"
    world.node.most_workers, world.node.fewest_available = 0, 99
    world.node.digest = "sha256:" + "b" * 64
    await world.edit(weightVersion="v2")
    await world.until("rolled and flushed", world.settled, 120)

    old, new = await claims(world)
    assert old["state"] == "Flushed" and new["state"] == "Active"
    proof = old["proof"]
    assert proof["bytesBefore"] >= 20 << 16 and proof["deleteStatus"] == 200
    assert proof["bytesBefore"] == proof["bytesEvicted"] + proof["bytesRemoved"]
    assert proof["objectsRemoved"] == 20
    assert world.node.fewest_available >= 2, "fewer workers than desired while maxUnavailable is 0"
    assert world.node.most_workers <= 3, "more pods than desired + maxSurge"
    assert await world.write_objects(old["tenant"], 1) == "-1701", "the store refuses the old tenant"
    assert await world.write_objects(new["tenant"], 1) == "0"
    assert len(await world.kube.list("ReplicaSet", world.namespace, {names.LABEL_ROLE: names.ROLE_WORKER})) == 1
    reasons = {event["reason"] for event in await world.kube.list("Event", world.namespace)}
    assert {"RevisionCreated", "NamespaceVerified", "RolloutStarted", "TenantFlushed", "RolloutComplete"} <= reasons
    assert world.operator.rss_mib() < 200


@scenario
async def an_idle_operator_writes_nothing(world: World) -> None:
    await deploy(world)
    await asyncio.sleep(2)

    async def versions() -> dict:
        kinds = (*[names.INFERENCE_SERVICE, names.KV_STORE], "ReplicaSet", "Deployment", "StatefulSet", "Pod", "Event")
        listed = [await world.kube.list(kind, world.namespace) for kind in kinds]
        ours = [i for items in listed for i in items if i["kind"] != "Event" or i.get("reportingComponent") == MANAGER]
        return {(item["kind"], item["metadata"]["name"]): item["metadata"]["resourceVersion"] for item in ours}

    before = await versions()
    world.operator.kill()
    world.operator.start()
    await asyncio.sleep(5)
    assert await versions() == before


@scenario
async def an_edit_back_during_the_bake_finds_the_old_tenant_warm(world: World) -> None:
    await deploy(world, rollout={"bake": "30s", "drainTimeout": "2s"})
    first = (await claims(world))[0]
    old_digest, world.node.digest = world.node.digest, "sha256:" + "b" * 64
    await world.edit(weightVersion="v2")

    async def baking() -> bool:
        return (await world.service())["status"]["rollout"]["step"] == "Baking"

    await world.until("baking", baking, 90)
    world.node.digest = old_digest
    await world.edit(weightVersion="v1", rollout={"bake": "1s"})
    await world.until("rolled back", world.settled, 90)
    states = {claim["tenant"]: claim["state"] for claim in await claims(world)}
    assert states[first["tenant"]] == "Active"
    assert sorted(states.values()) == ["Active", "Flushed"]


@scenario
async def other_weights_under_a_pinned_version_are_refused_even_when_all_restart(world: World) -> None:
    await deploy(world)
    world.node.digest = "sha256:" + "f" * 64
    for pod in world.node.workers():
        world.node.restart(pod)

    async def refused() -> bool:
        status, reason, message = await world.condition("NamespaceVerified")
        return status == "False" and reason == "WeightsDigestMismatch" and "f" * 64 in message and "a" * 64 in message

    await world.until("refused", refused)
    assert not any(pod.ready for pod in world.node.workers())
    world.node.digest = "sha256:" + "a" * 64
    for pod in world.node.workers():
        world.node.restart(pod)
    await world.until("the old weights are taken again", world.settled)


@scenario
async def a_container_restarted_with_the_same_weights_needs_no_operator(world: World) -> None:
    await deploy(world)
    world.operator.kill()
    pod = world.node.workers()[0]
    world.node.restart(pod)
    assert not pod.ready

    async def ready() -> bool:
        return pod.ready

    await world.until("ready again", ready, 20)


@scenario
async def with_the_store_down_the_roll_completes_and_the_flush_waits(world: World) -> None:
    await deploy(world)
    master = next(pod for pod in world.node.pods.values() if pod.role == names.ROLE_MASTER)
    for process in master.processes:
        process.kill()
        await process.wait()
    world.node.digest = "sha256:" + "b" * 64
    await world.edit(weightVersion="v2")

    async def rolled() -> bool:
        flushed = await world.condition("L3Flushed")
        return await world.is_true("RolloutComplete", "WorkersReady") and flushed[:2] == ("False", "Flushing")

    await world.until("rolled", rolled, 90)
    assert (await world.condition("CacheReady"))[0] == "False"
    # It comes back with its tenants (the file lives as long as the pod) and without its objects.
    await world.node.start_master(master)
    await world.until("flushed", world.settled, 90)


@scenario
async def an_operator_killed_again_and_again_still_finishes(world: World) -> None:
    await deploy(world)
    assert await world.write_objects((await claims(world))[0]["tenant"]) == "0"
    world.node.digest = "sha256:" + "b" * 64
    world.node.most_workers, world.node.fewest_available = 0, 99
    await world.edit(weightVersion="v2")
    for pause in (1.6, 1.9, 2.3, 1.7, 2.9):
        await asyncio.sleep(pause)
        world.operator.kill()
        world.operator.start()
    await world.until("rolled and flushed", world.settled, 120)
    old = (await claims(world))[0]
    assert old["state"] == "Flushed" and old["proof"]["deleteStatus"] in (200, 404)
    assert world.node.fewest_available >= 2 and world.node.most_workers <= 3


@scenario
async def edits_in_mid_roll_end_at_the_last_one(world: World) -> None:
    await deploy(world)
    world.node.most_workers, world.node.fewest_available = 0, 99
    for version, letter in (("v2", "b"), ("v1", "a"), ("v3", "c")):
        world.node.digest = "sha256:" + letter * 64
        await world.edit(weightVersion=version)
        await asyncio.sleep(1.5)
    await world.until("ended at v3", world.settled, 120)
    assert (await world.service())["status"]["rollout"]["step"] == "Complete"
    states = [(claim["weightVersion"], claim["state"]) for claim in await claims(world)]
    assert ("v3", "Active") in states and all(s == "Flushed" for v, s in states if v != "v3")
    assert world.node.fewest_available >= 2 and world.node.most_workers <= 3


@scenario
async def a_broken_start_is_told_in_the_workers_own_words(world: World) -> None:
    world.node.start_error = "model path /model/w.gguf: no such file"
    for manifest in (kv_store(), chat()):
        manifest["metadata"]["namespace"] = world.namespace
        await world.kube.create(manifest)

    async def told() -> bool:
        return "no such file" in (await world.condition("WorkersReady"))[2]

    await world.until("told", told)


@scenario
async def deleting_a_store_in_use_waits_but_not_in_a_namespace_that_goes(world: World) -> None:
    await deploy(world)
    await world.kube.delete(names.KV_STORE, world.namespace, "kv")
    await asyncio.sleep(2)
    live = await world.store()
    in_use = next(c for c in live["status"]["conditions"] if c["type"] == "InUse")
    assert in_use["status"] == "True" and "chat" in in_use["message"]
    await world.kube.delete("Namespace", "", world.namespace)

    async def gone() -> bool:
        return not await world.store()

    await world.until("gone", gone, 60)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", SCENARIOS)
async def test_scenario(playing: dict[str, asyncio.Task[None]], name: str) -> None:
    await playing[name]
