"""KV events of a real worker, as a subscriber sees them that shares no code with it."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import pytest

from ..cache.events.subscriber import Subscriber, documented_hashes
from .conftest import StartWorker, WorkerProcess, free_port

pytestmark = pytest.mark.model

PAGE = 16


@pytest.fixture
def told(start_worker: StartWorker) -> Iterator[tuple[WorkerProcess, Subscriber]]:
    """L1 has 68 blocks and L2 90: six prompts of 26 blocks, six of them shared, are more than either holds."""
    live, replay = free_port(), free_port()
    config = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{live}",
        "replay_endpoint": f"tcp://*:{replay}",
        "topic": "kv@worker",
    }
    flags = ["--kv-events-config", json.dumps(config), "--dtype", "float32", "--l1-size", "48Mi", "--l2-size", "64Mi"]
    worker = start_worker(*flags)
    addresses = f"tcp://127.0.0.1:{live}", f"tcp://127.0.0.1:{replay}"
    subscriber = Subscriber(*addresses, "kv@worker", lose=frozenset({2, 3, 5}))
    worker.wait_for("/ready")
    yield worker, subscriber
    subscriber.close()


def prompt(number: int) -> list[int]:
    """Six shared pages, twenty of its own, and three tokens."""
    shared = [1000 + place for place in range(6 * PAGE)]
    return shared + [2000 + 37 * number + place for place in range(20 * PAGE + 3)]


def complete(client: httpx.Client, tokens: list[int]) -> dict[str, int]:
    body = {"prompt": tokens, "max_tokens": 2, "temperature": 0, "ignore_eos": True}
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["usage"]["prompt_tokens_details"]["moonpool"]


def expected(subscriber: Subscriber, tokens: list[int]) -> dict[str, int]:
    """What the worker should take from each tier, going by its events alone."""
    held = subscriber.held(tokens, PAGE)[: (len(tokens) - 1) // PAGE]
    l1 = next((page for page, media in enumerate(held) if "GPU" not in media), len(held))
    l2 = next((page for page, media in enumerate(held[l1:]) if "CPU" not in media), len(held) - l1)
    return {"l1_tokens": l1 * PAGE, "l2_tokens": l2 * PAGE, "l3_tokens": 0}


def cached_blocks(client: httpx.Client) -> dict[str, int]:
    stats = client.get("/v1/cache/stats").json()
    return {"GPU": stats["l1_cached_blocks"], "CPU": stats["l2_cached_blocks"]}


def test_a_subscriber_that_loses_messages_knows_what_every_tier_holds(told: tuple[WorkerProcess, Subscriber]) -> None:
    worker, subscriber = told
    with worker.client() as client:
        for number in range(6):
            complete(client, prompt(number))
        subscriber.listen()
        assert subscriber.lost
        assert set(subscriber.lost) <= set(subscriber.replayed)
        assert {medium: len(blocks) for medium, blocks in subscriber.blocks.items()} == cached_blocks(client)
        assert {"computed", "copied", "capacity"} <= subscriber.reasons
        assert set(documented_hashes(prompt(5), PAGE)) <= set(subscriber.blocks["GPU"])

        tiers = dict.fromkeys(("l1_tokens", "l2_tokens"), 0)
        for number in (5, 2, 3, 5):
            foreseen = expected(subscriber, prompt(number))
            assert complete(client, prompt(number)) == foreseen
            for tier in tiers:
                tiers[tier] += foreseen[tier]
            subscriber.listen()
        # Otherwise the comparison was about nothing.
        assert all(tiers.values()), tiers
        assert {medium: len(blocks) for medium, blocks in subscriber.blocks.items()} == cached_blocks(client)

        client.post("/v1/cache/flush", json={"tiers": ["l1"]})
        subscriber.listen()
        assert not subscriber.blocks["GPU"]
        assert len(subscriber.blocks["CPU"]) == cached_blocks(client)["CPU"] > 0
        client.post("/v1/cache/flush", json={})
        subscriber.listen()
        assert not any(subscriber.blocks.values())
        assert subscriber.batches[-1] == [["AllBlocksCleared"]]
        assert cached_blocks(client) == {"GPU": 0, "CPU": 0}

        assert metric(client, 'kv_event_batches_total{state="published"}') == len(subscriber.batches)
        assert metric(client, 'kv_event_batches_total{state="dropped"}') == 0
        assert metric(client, "kv_event_replays_total") >= 1


def metric(client: httpx.Client, name: str) -> float:
    prefix = f"moonpool:{name} "
    (line,) = (line for line in client.get("/metrics").text.splitlines() if line.startswith(prefix))
    return float(line.removeprefix(prefix))
