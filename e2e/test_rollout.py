"""An edit of the weight version under traffic: no request fails, the old cache is flushed, the store proves it."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from e2e.fleet import Fleet
from e2e.prompts import CHATS
from e2e.resources import inference_service, kv_store, restricted_pod
from e2e.rollout_watch import follow, rollout_complete
from e2e.traffic import Traffic, summarize

WRITER = Path(__file__).parent / "stubborn_writer.py"


@pytest.fixture(scope="module")
def served(fleet: Fleet) -> Fleet:
    fleet.apply([kv_store(), inference_service(replicas=1)])
    fleet.wait_condition("Ready", timeout=420)
    fleet.wait_condition("CacheReady", timeout=120)
    return fleet


def refusals(log: str) -> list[int]:
    """The codes that the writer was answered, in order, repeats left out."""
    codes: list[int] = []
    # Mooncake writes its own lines in between.
    for code in map(int, re.findall(r"^try (-?\d+)$", log, re.MULTILINE)):
        if codes[-1:] != [code]:
            codes.append(code)
    return codes


async def test_a_weight_edit_rolls_and_proves_its_flush(served: Fleet) -> None:
    fleet = served
    before = fleet.service()["status"]["kvNamespaces"]
    old = next(n for n in before if n["state"] == "Active")
    master = fleet.get("kvstore", "kv")["status"]["master"]
    command = ["python3", "-c", WRITER.read_text(), master, old["tenant"]]
    fleet.apply(restricted_pod("stubborn", "registry.local/moonpool/store:dev", command))
    fleet.wait("the old version's writer writes", lambda: "try 0" in fleet.run("logs", "stubborn", check=False), 60)

    with fleet.gateway() as url:
        traffic = Traffic(url, CHATS, "smollm2", concurrency=2)
        try:
            await asyncio.sleep(5)
            fleet.run("patch", "isvc", "chat", "--type=merge", "-p", '{"spec":{"weightVersion":"v2"}}')
            service = await follow(fleet, rollout_complete("v2"), print, timeout=420)
            await asyncio.sleep(3)
        finally:
            answers = await traffic.stop()

    summary = summarize(answers)
    print(summary)
    assert summary.failed == 0, summary.errors
    assert len(summary.fingerprints) == 2, "both versions answered, and nobody else"

    flushed = next(n for n in service["status"]["kvNamespaces"] if n["hash"] == old["hash"])
    proof = flushed["proof"]
    print(proof)
    assert flushed["state"] == "Flushed"
    assert proof["deleteStatus"] in (200, 204)
    assert proof["bytesBefore"] > 0
    assert proof["bytesBefore"] == proof["bytesEvicted"] + proof["bytesRemoved"]

    await asyncio.sleep(2)
    seen = refusals(fleet.run("logs", "stubborn"))
    print("the old version's writer was answered", seen)
    assert seen[0] == 0
    assert seen[-2:] == [-1700, -1701]


def test_describe_tells_the_story(served: Fleet) -> None:
    told = served.run("describe", "inferenceservice", "chat")
    print(told[told.index("Events:") :])
    for reason in ("RolloutStarted", "NamespaceVerified", "TenantFlushed", "RolloutComplete"):
        assert reason in told


def test_columns_are_useful(served: Fleet) -> None:
    listed = served.run("get", "inferenceservices,kvstores")
    print(listed)
    assert "v2" in listed
    assert "True" in listed
