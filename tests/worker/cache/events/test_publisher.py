"""The publisher against a subscriber of its own kind: frames, gaps, replay, and an engine that never waits."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import zmq
from moonpool_worker.cache.events.config import EventsConfig, parse_events_config
from moonpool_worker.cache.events.publisher import EventPublisher, EventsError
from moonpool_worker.cache.events.residency import Residency
from moonpool_worker.cache.events.wire import Cleared, Removed, Stored, encode_batch
from moonpool_worker.cache.extra_keys import frame_keys
from moonpool_worker.cache.hash_chain import hash_chain

from .subscriber import END, Subscriber, documented_hashes

PAGE = 4

Begin = Callable[..., tuple[EventPublisher, Subscriber]]


class Base(msgspec.Struct, array_like=True, tag=True):
    pass


class BlockStored(Base):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int


class BlockRemoved(Base):
    block_hashes: list[int]


class AllBlocksCleared(Base):
    pass


class Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    attn_dp_rank: int | None = None


@pytest.fixture
def begin(tmp_path: Any) -> Iterator[Begin]:
    closing: list[Any] = []

    def start(lose: frozenset[int] = frozenset(), **options: Any) -> tuple[EventPublisher, Subscriber]:
        live, replay = f"ipc://{tmp_path}/live", f"ipc://{tmp_path}/replay"
        config = EventsConfig(endpoint=live, replay_endpoint=replay, topic="kv", **options)
        publisher = EventPublisher(config)
        subscriber = Subscriber(live, replay, "kv", lose)
        closing.extend([publisher, subscriber])
        # A subscription takes a moment to arrive; what was sent before is replayed.
        time.sleep(0.2)
        return publisher, subscriber

    yield start
    for each in closing:
        each.close()


def wait_until(done: Callable[[], bool], seconds: float = 5) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def pages(count: int, base: int = 0) -> tuple[list[bytes], list[int]]:
    tokens = [base + number for number in range(count * PAGE)]
    return hash_chain(tokens, PAGE), tokens


def test_lost_messages_are_asked_for_and_the_picture_is_whole(begin: Begin) -> None:
    publisher, subscriber = begin(lose=frozenset({3, 4, 7}))
    residency = Residency(publisher, 1, PAGE)
    residency.flush()
    for number in range(10):
        links, tokens = pages(3, base=100 * number)
        residency.described(links, None, tokens, b"")
        for link in links:
            residency.stored("l1", 0, link, "computed")
        if number == 5:
            for link in pages(3, base=100)[0]:
                residency.removed("l1", 0, link, "capacity")
        residency.flush()
    subscriber.listen()
    assert subscriber.lost == [3, 4, 7]
    assert {3, 4, 7} <= set(subscriber.replayed)
    assert subscriber.next_sequence == 11
    for number in range(10):
        links, tokens = pages(3, base=100 * number)
        assert subscriber.held(tokens, PAGE) == ([] if number == 1 else [{"GPU"}] * 3)
        if number != 1:
            assert set(documented_hashes(tokens, PAGE)) <= set(subscriber.blocks["GPU"])
    assert len(subscriber.blocks["GPU"]) == 27
    assert subscriber.reasons == {"computed", "capacity"}


def test_old_subscribers_read_the_fields_they_know() -> None:
    """TokenSpeed's structs: arrays of five fields, one field and none; msgspec leaves out what comes after."""

    links, tokens = pages(2)
    events = [
        Stored("l1", links, None, tokens, PAGE, b"", "computed"),
        Removed("l1", links[1:], "capacity"),
        Cleared(),
    ]
    batch = msgspec.msgpack.decode(encode_batch(1.5, events, 0), type=Batch)
    hashes = documented_hashes(tokens, PAGE)
    assert batch.events == [BlockStored(hashes, None, tokens, PAGE), BlockRemoved(hashes[1:]), AllBlocksCleared()]
    assert (batch.ts, batch.attn_dp_rank) == (1.5, 0)


def test_maps_for_subscribers_of_newer_vllm() -> None:
    links, tokens = pages(2)
    stored = Stored("l2", links, None, tokens, PAGE, frame_keys([("cache_salt", b"tenant")]), "copied")
    _, (event, removed), _ = msgspec.msgpack.decode(encode_batch(0, [stored, Removed("l1", links, "flush")], 0, "map"))
    assert event == {
        "type": "BlockStored",
        "block_hashes": documented_hashes(tokens, PAGE),
        "parent_block_hash": None,
        "token_ids": tokens,
        "block_size": PAGE,
        "lora_id": None,
        "lora_name": None,
        "medium": "CPU",
        "extra_keys": [["tenant"], None],
        "reason": "copied",
    }
    assert (removed["medium"], removed["reason"]) == ("GPU", "flush")


def test_a_full_queue_drops_counts_and_leaves_a_gap(begin: Begin, monkeypatch: pytest.MonkeyPatch) -> None:
    publisher, subscriber = begin(max_queue_size=2)
    monkeypatch.setattr("moonpool_worker.cache.events.publisher.os.eventfd_write", lambda fd, value: None)
    started = time.monotonic()
    for _ in range(5):
        publisher.publish([Cleared()])
    assert time.monotonic() - started < 0.1
    assert (publisher.dropped, publisher.queued) == (3, 2)
    monkeypatch.undo()
    os.eventfd_write(publisher._wake, 1)
    wait_until(lambda: not publisher.queued)
    publisher.publish([Cleared()])
    numbers = list(subscriber.sequence_numbers())
    assert numbers == [0, 1, 5], "the dropped ones left no gap"


def test_replay_holds_the_last_steps_only_and_answers_both_kinds_of_client(begin: Begin) -> None:
    publisher, subscriber = begin(buffer_steps=3)
    for _ in range(5):
        publisher.publish([Cleared()])
    with zmq.Context() as context, context.socket(zmq.REQ) as req, context.socket(zmq.DEALER) as dealer:
        for client in (req, dealer):
            client.connect(subscriber.replay_endpoint)
            client.send((0).to_bytes(8, "big"))
        numbers = []
        while True:
            sequence, payload = dealer.recv_multipart()
            if sequence == END:
                break
            assert msgspec.msgpack.decode(payload)[1] == [["AllBlocksCleared"]]
            numbers.append(int.from_bytes(sequence, "big"))
        assert numbers == [2, 3, 4]
        assert int.from_bytes(req.recv_multipart()[0], "big") == 2


def test_an_address_in_use_is_one_sentence() -> None:
    with socket.create_server(("0.0.0.0", 0)) as taken:
        address = f"tcp://*:{taken.getsockname()[1]}"
        with pytest.raises(EventsError, match=r"cannot use .*: Address already in use"):
            EventPublisher(EventsConfig(endpoint=address))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "Input data was truncated"),
        ('{"port": 1}', "unknown field `port`"),
        ('{"publisher": "kafka"}', "null or zmq, not 'kafka'"),
        ('{"tiers": ["gpu"]}', "l1, l2 or both, not gpu"),
        ('{"hwm": 0}', "hwm is at least 1"),
        ('{"hwm": 2147483648}', "hwm is at most"),
        ('{"layout": "xml"}', "array or map"),
    ],
)
def test_bad_configurations_are_one_sentence(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse_events_config(text)


def test_tokenspeeds_configuration_is_taken_as_it_is() -> None:
    config = parse_events_config(
        '{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:5557", "replay_endpoint":'
        ' "tcp://*:5558", "buffer_steps": 10000, "hwm": 100000, "max_queue_size": 100000, "topic": "kv"}'
    )
    assert config.enabled
    assert not parse_events_config('{"enable_kv_cache_events": true, "publisher": "null"}').enabled
    assert not parse_events_config("{}").enabled
