"""A subscriber that knows vLLM's wire format from its description alone: ZMQ and msgpack, nothing of Moonpool."""

from __future__ import annotations

import hashlib
import struct
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import zmq

END = (-1).to_bytes(8, "big", signed=True)


@dataclass
class Subscriber:
    """``blocks``: by medium, hash → (parent hash or None, token ids). ``lose``: sequence numbers to act deaf for."""

    endpoint: str
    replay_endpoint: str
    topic: str = ""
    lose: frozenset[int] = frozenset()
    blocks: dict[str, dict[int, tuple[int | None, tuple[int, ...]]]] = field(default_factory=dict)
    next_sequence: int = 0
    lost: list[int] = field(default_factory=list)
    replayed: list[int] = field(default_factory=list)
    reasons: set[str] = field(default_factory=set)
    batches: list[list[Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._context = zmq.Context()
        self._sub = self._context.socket(zmq.SUB)
        self._sub.subscribe(self.topic)
        self._sub.connect(self.endpoint)

    def close(self) -> None:
        self._context.destroy(linger=0)

    def listen(self, quiet: float = 0.3, limit: float = 20) -> None:
        """Take in messages until none came for ``quiet`` seconds; what is missing in between is asked for."""
        deadline = time.monotonic() + limit
        while time.monotonic() < deadline and self._sub.poll(quiet * 1000):
            topic, sequence, payload = self._sub.recv_multipart()
            assert topic.decode() == self.topic
            number = int.from_bytes(sequence, "big")
            if number in self.lose:
                self.lost.append(number)
                continue
            if number < self.next_sequence:
                continue
            if number > self.next_sequence:
                self.catch_up()
            if number >= self.next_sequence:
                self._take(number, payload)

    def sequence_numbers(self, quiet: float = 0.3) -> Iterator[int]:
        """Of live messages, whatever they say, until none came for ``quiet`` seconds."""
        while self._sub.poll(quiet * 1000):
            yield int.from_bytes(self._sub.recv_multipart()[1], "big")

    def catch_up(self) -> None:
        """Ask for everything from the first number that is missing."""
        dealer = self._context.socket(zmq.DEALER)
        dealer.connect(self.replay_endpoint)
        dealer.send_multipart([b"", self.next_sequence.to_bytes(8, "big")])
        while dealer.poll(5000):
            empty, sequence, payload = dealer.recv_multipart()
            assert empty == b""
            if sequence == END:
                assert payload == b""
                break
            number = int.from_bytes(sequence, "big")
            self.replayed.append(number)
            self._take(number, payload)
        else:
            raise TimeoutError("the replay did not end")
        dealer.close()

    def held(self, token_ids: Sequence[int], block_size: int) -> list[set[str]]:
        """For each leading block of a prompt, the media said to hold it; up to the first that none holds."""
        known: dict[tuple[int | None, tuple[int, ...]], tuple[int, set[str]]] = {}
        for medium, blocks in self.blocks.items():
            for number, (parent, tokens) in blocks.items():
                known.setdefault((parent, tokens), (number, set()))[1].add(medium)
        parent: int | None = None
        found: list[set[str]] = []
        for start in range(0, len(token_ids) // block_size * block_size, block_size):
            tokens = tuple(token_ids[start : start + block_size])
            if (parent, tokens) not in known:
                break
            parent, media = known[parent, tokens]
            found.append(media)
        return found

    def _take(self, number: int, payload: bytes) -> None:
        assert number == self.next_sequence, f"{number} came, {self.next_sequence} was due"
        self.next_sequence = number + 1
        timestamp, events, rank = msgspec.msgpack.decode(payload)
        assert abs(timestamp - time.time()) < 300
        assert rank == 0
        self.batches.append(events)
        for event in events:
            self._apply(*event)

    def _apply(self, tag: str, *fields: Any) -> None:
        if tag == "AllBlocksCleared":
            self.blocks.clear()
            return
        if tag == "BlockStored":
            hashes, parent, token_ids, block_size, _lora_id, medium = fields[:6]
            assert len(token_ids) == len(hashes) * block_size
            held = self.blocks.setdefault(medium, {})
            for index, number in enumerate(hashes):
                assert 0 <= number < 2**64
                assert number not in held, "announced twice"
                held[number] = (parent, tuple(token_ids[index * block_size : (index + 1) * block_size]))
                parent = number
        else:
            assert tag == "BlockRemoved"
            hashes, medium = fields[:2]
            for number in hashes:
                del self.blocks[medium][number]
        self.reasons.add(fields[-1])


def documented_hashes(token_ids: Iterable[int], block_size: int) -> list[int]:
    """Hashes as docs/engine.md describes them."""
    tokens = list(token_ids)
    link = hashlib.sha256(b"moonpool/prefix/1\n" + struct.pack("<II", block_size, 0)).digest()
    hashes = []
    for start in range(0, len(tokens) // block_size * block_size, block_size):
        link = hashlib.sha256(link + struct.pack(f"<{block_size}I", *tokens[start : start + block_size])).digest()
        hashes.append(int.from_bytes(link[:8], "big"))
    return hashes
