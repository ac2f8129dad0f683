"""The store may be away: from before the first apply, and during an edit. Traffic does not notice."""

from __future__ import annotations

import asyncio

import pytest

from e2e.demo.__main__ import ask
from e2e.fleet import Fleet
from e2e.prompts import VISITORS
from e2e.resources import inference_service, kv_store
from e2e.rollout_watch import follow, rollout_complete
from e2e.traffic import Traffic, summarize


@pytest.fixture(scope="module")
def served(fleet: Fleet) -> Fleet:
    # There is no KVStore at all yet.
    fleet.apply(inference_service(replicas=1))
    fleet.wait("a worker is ready", lambda: fleet.condition("WorkersReady")["status"] == "True", 420)
    fleet.wait("the gateway is ready", lambda: fleet.condition("GatewayReady")["status"] == "True", 120)
    return fleet


def test_a_missing_store_is_said_and_does_not_hold_up_the_chat(served: Fleet) -> None:
    condition = served.condition("CacheReady")
    print(condition)
    assert condition["status"] == "False"
    assert "kv" in condition["message"]
    with served.gateway() as url:
        answer = asyncio.run(ask(url, 0))
    assert "Tokyo" in answer.text


def test_the_store_is_used_once_it_is_there(served: Fleet) -> None:
    served.apply(kv_store())
    served.wait_condition("CacheReady", timeout=240)


async def test_an_edit_with_the_store_down_moves_traffic_and_flushes_later(served: Fleet) -> None:
    with served.gateway() as url:
        for question in range(3):
            await ask(url, question)
        await asyncio.sleep(2)
        # The master stays away until it is let back: paused by a node selector that no node has.
        held = '{"spec":{"template":{"spec":{"nodeSelector":{"moonpool.dev/nowhere":"true"}}}}}'
        await asyncio.to_thread(_hold_master, served, held)
        traffic = Traffic(url, VISITORS, "smollm2", concurrency=2)
        try:
            # Told in the two places where an operator of the fleet looks: the worker's metric and the condition.
            failing = 'moonpool:l3_state{state="failing"}'
            await asyncio.to_thread(
                served.wait, "a metric says that L3 fails", lambda: served.worker_metrics()[failing] == 1, 60
            )
            condition = served.condition("CacheReady")
            print(condition)
            assert condition["status"] == "False"
            served.run("patch", "isvc", "chat", "--type=merge", "-p", '{"spec":{"weightVersion":"v2"}}')
            service = await follow(served, _moved("v2"), print, timeout=420)
            flushed = next(c for c in service["status"]["conditions"] if c["type"] == "L3Flushed")
            print(flushed)
            assert flushed["status"] != "True"
            await asyncio.sleep(3)
        finally:
            answers = await traffic.stop()
        summary = summarize(answers)
        print(summary)
        assert summary.failed == 0, summary.errors
        await asyncio.to_thread(_release_master, served)
        await follow(served, rollout_complete("v2"), print, timeout=300)


def _moved(version: str):
    """Traffic is on ``version`` alone; fence and flush may still be pending."""

    def done(service: dict) -> bool:
        revisions = [r for r in service.get("status", {}).get("revisions", []) if r.get("replicas", 0) > 0]
        workers = next((c for c in service["status"]["conditions"] if c["type"] == "WorkersReady"), {})
        return (
            [r["weightVersion"] for r in revisions] == [version]
            and workers.get("status") == "True"
            and workers.get("observedGeneration") == service["metadata"]["generation"]
        )

    return done


def _master_workload(fleet: Fleet) -> str:
    found = fleet.get("deployments,statefulsets", "-l", "moonpool.dev/role=kv-master")["items"][0]
    return f"{found['kind'].lower()}/{found['metadata']['name']}"


def _hold_master(fleet: Fleet, patch: str) -> None:
    fleet.run("patch", _master_workload(fleet), "--type=merge", "-p", patch)
    fleet.run("delete", "pods", "-l", "moonpool.dev/role=kv-master", "--force", "--grace-period=0")
    fleet.wait_condition("MasterReady", "False", timeout=60, what="kvstore/kv")


def _release_master(fleet: Fleet) -> None:
    patch = '{"spec":{"template":{"spec":{"nodeSelector":null}}}}'
    fleet.run("patch", _master_workload(fleet), "--type=merge", "-p", patch)
    fleet.run("delete", "pods", "-l", "moonpool.dev/role=kv-master", "--force", "--grace-period=0", check=False)
    fleet.wait_condition("MasterReady", timeout=120, what="kvstore/kv")
