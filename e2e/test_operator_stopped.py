"""With the operator away: the same weights come back serving, other weights never become Ready."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import httpx
import pytest
from moonpool_worker.weights.export import perturb_gguf
from moonpool_worker.weights.resolve import packaged_smollm2

from e2e.demo.__main__ import body
from e2e.fleet import OPERATOR_NAMESPACE, WEIGHTS_FILE, Fleet, Kubectl, replace_file
from e2e.resources import inference_service, kv_store
from e2e.traffic import Answer, chat


@pytest.fixture(scope="module")
def served(fleet: Fleet) -> Iterator[Fleet]:
    fleet.apply([kv_store(), inference_service(replicas=1)])
    fleet.wait_condition("Ready", timeout=420)
    yield fleet
    _scale_operator(fleet, 1)


def _scale_operator(fleet: Fleet, replicas: int) -> None:
    operator = Kubectl(fleet.cluster, OPERATOR_NAMESPACE)
    operator.run("scale", "deployment/moonpool-operator", f"--replicas={replicas}")
    if replicas:
        operator.run("rollout", "status", "deployment/moonpool-operator", "--timeout=120s", timeout=130)
    else:
        operator.run("wait", "--for=delete", "pod", "--all", "--timeout=60s", check=False, timeout=70)


def _kill_container(fleet: Fleet, pod: dict) -> None:
    container = pod["status"]["containerStatuses"][0]["containerID"].removeprefix("containerd://")
    fleet.cluster.node_exec(["ctr", "-n", "k8s.io", "tasks", "kill", "-s", "SIGKILL", container])


def _status(fleet: Fleet) -> dict:
    return fleet.workers()[0]["status"]["containerStatuses"][0]


def test_a_killed_worker_comes_back_serving(served: Fleet) -> None:
    _scale_operator(served, 0)
    restarts = _status(served)["restartCount"]
    _kill_container(served, served.workers()[0])
    served.wait("restarted", lambda: _status(served)["restartCount"] > restarts, 60)
    seconds = served.wait("ready without the operator", lambda: _status(served)["ready"], 120)
    print(f"ready {seconds:.1f} s after the restart, operator stopped")
    with served.gateway() as url:
        answer = asyncio.run(_patient(url))
    assert "Tokyo" in answer.text, answer


async def _patient(url: str) -> Answer:
    """The first answer: the gateway hears of the only worker's return a few seconds after the kubelet."""
    begin = time.monotonic()
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        while True:
            answer = await chat(client, body(0), stream=False)
            if not answer.failed or time.monotonic() - begin > 60:
                print(f"answered {time.monotonic() - begin:.1f} s after the pod was ready")
                return answer
            await asyncio.sleep(0.5)


def test_other_weights_never_become_ready(served: Fleet) -> None:
    _scale_operator(served, 0)
    swapped = served.weights_folder() / "swapped.gguf"
    perturb_gguf(packaged_smollm2(), swapped)
    replace_file(swapped, served.weights_folder() / WEIGHTS_FILE)
    restarts = _status(served)["restartCount"]
    _kill_container(served, served.workers()[0])
    served.wait("restarted", lambda: _status(served)["restartCount"] > restarts, 60)
    end = time.monotonic() + 45
    while time.monotonic() < end:
        assert not _status(served)["ready"], "a worker with other weights became Ready"
        time.sleep(1)

    _scale_operator(served, 1)
    served.wait_condition("NamespaceVerified", "False", timeout=120)
    condition = served.condition("NamespaceVerified")
    print(condition["reason"], condition["message"])
    assert "digest" in condition["message"]


def test_a_new_pod_with_other_weights_is_refused_under_the_old_version(served: Fleet) -> None:
    served.run("delete", "pods", "-l", "moonpool.dev/role=worker", "--wait=true", "--timeout=120s")
    served.wait("a new pod runs", lambda: served.workers() and served.workers()[0]["status"]["phase"] == "Running", 120)
    time.sleep(20)
    served.wait_condition("NamespaceVerified", "False", timeout=60)
    assert not any(_ready(pod) for pod in served.workers())

    # An edit of the version says that the new weights are meant.
    served.run("patch", "isvc", "chat", "--type=merge", "-p", '{"spec":{"weightVersion":"v2"}}')
    served.wait_condition("NamespaceVerified", "True", timeout=240)
    served.wait("the new version is ready", lambda: any(_ready(pod) for pod in served.workers()), 120)


def _ready(pod: dict) -> bool:
    return any(c["type"] == "Ready" and c["status"] == "True" for c in pod["status"].get("conditions", []))
