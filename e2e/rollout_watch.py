"""Follow a rollout: each change of its step, and the states of the KV namespaces, as they come."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from e2e.fleet import Fleet, NotReached


async def follow(fleet: Fleet, done: Callable[[dict], bool], tell: Callable[[str], None], timeout: float) -> dict:
    """Poll the service's status and tell each change until ``done(service)``; returns the last service seen.

    Raises NotReached with the fleet's state when ``timeout`` seconds went by.
    """
    begin = time.monotonic()
    told: dict[str, str] = {}
    service: dict = {}
    while time.monotonic() - begin < timeout:
        found = await asyncio.to_thread(fleet.find, "inferenceservice", "chat")
        if found:
            service = found
            for key, text in _lines(service).items():
                if told.get(key) != text:
                    told[key] = text
                    tell(f"{time.monotonic() - begin:6.1f} s  {text}")
            if done(service):
                return service
        await asyncio.sleep(0.5)
    raise NotReached(f"the rollout did not end within {timeout:.0f} s\n{fleet.describe()}")


def _lines(service: dict) -> dict[str, str]:
    status = service.get("status", {})
    lines = {}
    rollout = status.get("rollout") or {}
    if rollout.get("step"):
        lines["rollout"] = f"rollout: {rollout['step']}" + (
            f" ({rollout['message']})" if rollout.get("message") else ""
        )
    ready = [f"{r['name']} {r.get('ready', 0)}/{r.get('replicas', 0)}" for r in status.get("revisions", [])]
    lines["revisions"] = "revisions ready: " + ", ".join(ready)
    for namespace in status.get("kvNamespaces", []):
        version = namespace.get("weightVersion", "")
        lines[namespace.get("tenant") or namespace["hash"]] = (
            f"KV namespace {namespace['hash'][:12]} (weights {version}): {namespace['state']}"
        )
    return lines


def rollout_complete(version: str, flushed: bool = True) -> Callable[[dict], bool]:
    """Is everything that the edit to weight version ``version`` set in motion over, the proof included?"""

    def done(service: dict) -> bool:
        if service["spec"]["weightVersion"] != version:
            return False
        generation = service["metadata"]["generation"]
        wanted = {"Ready", "RolloutComplete"} | ({"L3Flushed"} if flushed else set())
        true = {
            c["type"]
            for c in service.get("status", {}).get("conditions", [])
            if c["status"] == "True" and c.get("observedGeneration") == generation
        }
        return wanted <= true

    return done
