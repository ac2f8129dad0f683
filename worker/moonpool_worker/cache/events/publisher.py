"""A thread that sends batches to subscribers and repeats them to those who missed some.

Frames of a message: topic, sequence number (8 bytes, big-endian), batch. A repeat is asked for at the replay socket
with the first wanted sequence number; the answers are ``(sequence number, batch)`` and end with ``(-1, b"")``.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from typing import cast

import structlog
import zmq

from moonpool_worker.cache.events.config import EventsConfig
from moonpool_worker.cache.events.wire import Event, Layout, encode_batch

_END = (-1).to_bytes(8, "big", signed=True)
#: How long what is queued may take to leave when the process ends.
_LINGER_MS = 500

_log = structlog.get_logger()


class EventsError(Exception):
    """One sentence: an address that cannot be used."""


class EventPublisher:
    """``publish`` is called by the engine's thread and never waits; the rest happens on a thread of its own.

    A batch gets its sequence number before it is queued: one that is dropped leaves a gap that a subscriber sees.
    """

    def __init__(self, config: EventsConfig, rank: int = 0) -> None:
        self.published = self.dropped = self.replays = 0
        self._config = config
        self._rank = rank
        self._layout = cast(Layout, config.layout)
        self._topic = config.topic.encode()
        self._queue: deque[tuple[int, float, list[Event]]] = deque()
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self._sequence = 0
        self._stopping = False
        self._context = zmq.Context()
        self._pub = self._open(zmq.PUB, config.endpoint, config.hwm)
        self._replay = None
        if config.replay_endpoint:
            # A whole buffer may be asked for at once, and a router drops silently what is above its mark.
            self._replay = self._open(zmq.ROUTER, config.replay_endpoint, config.buffer_steps + 1)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    @property
    def queued(self) -> int:
        """Batches that wait to be sent."""
        return len(self._queue)

    def publish(self, events: list[Event]) -> None:
        sequence, self._sequence = self._sequence, self._sequence + 1
        if len(self._queue) >= self._config.max_queue_size:
            self.dropped += 1
            return
        self._queue.append((sequence, time.time(), events))
        os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Send what is queued, for half a second at most, and close the sockets. Twice is once."""
        if self._stopping:
            return
        self._stopping = True
        os.eventfd_write(self._wake, 1)
        self._thread.join(2 * _LINGER_MS / 1000)

    def _open(self, kind: int, address: str, hwm: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.set_hwm(hwm)
        socket.linger = _LINGER_MS
        try:
            if "*" in address or "::" in address or address.startswith(("ipc://", "inproc://")):
                socket.bind(address)
            else:
                socket.connect(address)
        except zmq.ZMQError as failure:
            self._context.destroy(0)
            raise EventsError(f"KV events cannot use {address}: {failure}") from failure
        return socket

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        while not self._stopping:
            ready = dict(poller.poll())
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake)
            self._send_queue()
            if self._replay is not None and self._replay in ready:
                self._answer(self._replay)
        self._send_queue()
        self._context.destroy()
        os.close(self._wake)

    def _send_queue(self) -> None:
        while self._queue:
            sequence, timestamp, events = self._queue.popleft()
            payload = encode_batch(timestamp, events, self._rank, self._layout)
            self._buffer.append((sequence, payload))
            self._pub.send_multipart((self._topic, sequence.to_bytes(8, "big"), payload))
            self.published += 1

    def _answer(self, replay: zmq.Socket[bytes]) -> None:
        """A DEALER's request has two frames, a REQ's an empty one between them; the answers are framed alike."""
        *envelope, asked = replay.recv_multipart()
        if len(envelope) not in (1, 2) or len(asked) != 8:
            _log.warning("a replay request is not 8 bytes of sequence number", frames=len(envelope) + 1)
            return
        first = int.from_bytes(asked, "big")
        for sequence, payload in self._buffer:
            if sequence >= first:
                replay.send_multipart((*envelope, sequence.to_bytes(8, "big"), payload))
        replay.send_multipart((*envelope, _END, b""))
        self.replays += 1
