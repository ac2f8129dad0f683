"""The L3 process: ``python -m moonpool_worker.cache.store_tier.process FD``.

It maps the engine's L2 arena, owns one Mooncake client, and answers packets on the socket FD. Why a process: the
client's ``setup()`` holds the GIL for seconds, a call can block for a minute, and a call after ``close()`` crashes.
So here a client is set up once, and ends with the process.

Reads and writes have a thread each: a slow put never delays a get (Mooncake releases the GIL in both).
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

from moonpool_worker.cache.store_tier import messages
from moonpool_worker.cache.store_tier.keys import store_key

_PR_SET_PDEATHSIG = 1
_PACKET = 1 << 18


class _Refused(Exception):
    """A read that was answered with a code instead of bytes."""

    def __init__(self, code: int) -> None:
        super().__init__(f"code {code}")
        self.code = code


class StoreClient:
    """One Mooncake client over one mapped arena, of one tenant and namespace."""

    def __init__(self, request: messages.Open) -> None:
        self._namespace = request.namespace
        self._map = mmap.mmap(request.arena_fd, request.arena_bytes)
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._bytes = request.arena_bytes
        self._store: Any = None

    def setup(self, request: messages.Open) -> int:
        """Mooncake's code; 0 also for a tenant that is not registered."""
        from mooncake.store import MooncakeDistributedStore

        self._store = MooncakeDistributedStore()
        code = self._store.setup(
            request.hostname,
            "P2PHANDSHAKE",
            0,  # a pure client: it lends no memory to the store
            request.local_buffer_bytes,
            request.protocol,
            request.device,
            request.master,
            tenant_id=request.tenant,
        )
        if code != 0:
            return int(code)
        return int(self._store.register_buffer(self._base, self._bytes))

    def measure(self, size: int) -> list[int]:
        """See :class:`messages.Measure`. The object is nobody else's, so it can be removed by force."""
        key = f"mp1-{self._namespace}_measure-{os.getpid()}-{os.urandom(8).hex()}"
        buffer = ctypes.create_string_buffer(size)
        address = ctypes.addressof(buffer)
        if code := int(self._store.register_buffer(address, size)):
            return [code]
        try:
            if code := int(self._store.batch_put_from([key], [address], [size])[0]):
                return [code]
            # The first call opens connections, and any can be held up: the best of a few is the store's own time.
            call = min(self._seconds(lambda: self._store.batch_is_exist([key])) for _ in range(3))
            read = min(self._seconds(lambda: self._read_all(key, address, size)) for _ in range(3))
            return [0, round(call * 1e6), round(read * 1e6)]
        finally:
            self._store.remove(key, True)
            self._store.unregister_buffer(address)

    def _read_all(self, key: str, address: int, size: int) -> None:
        code = int(self._store.batch_get_into([key], [address], [size])[0])
        if code != size:
            raise _Refused(code)

    @staticmethod
    def _seconds(work: Callable[[], object]) -> float:
        started = time.perf_counter()
        work()
        return time.perf_counter() - started

    def exist(self, request: messages.Exist) -> list[int]:
        return list(self._store.batch_is_exist(self._keys(request)))

    def get(self, request: messages.Get) -> list[int]:
        return list(self._store.batch_get_into(*self._arguments(request)))

    def put(self, request: messages.Put) -> list[int]:
        return list(self._store.batch_put_from(*self._arguments(request)))

    def _arguments(self, request: messages.Get | messages.Put) -> tuple[list[str], list[int], list[int]]:
        places = zip(request.offsets, request.sizes, strict=True)
        if any(size <= 0 or not 0 <= offset <= self._bytes - size for offset, size in places):
            raise ValueError("a block is outside the arena")
        return self._keys(request), [self._base + offset for offset in request.offsets], request.sizes

    def _keys(self, request: messages.Exist | messages.Get | messages.Put) -> list[str]:
        blocks = zip(request.groups, request.hashes, strict=True)
        return [store_key(self._namespace, one, group) for group, one in blocks]


class Lane:
    """One thread that answers requests in order."""

    def __init__(self, name: str, answer: Callable[[messages.Request], None]) -> None:
        self._queue: queue.SimpleQueue[messages.Request | None] = queue.SimpleQueue()
        self._answer = answer
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def add(self, request: messages.Request) -> None:
        self._queue.put(request)

    def finish(self) -> None:
        """Answer what is queued, then end."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (request := self._queue.get()) is not None:
            self._answer(request)


class Server:
    """Packets in, packets out, until the engine closes the client or is gone."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._sending = threading.Lock()
        self._client: StoreClient | None = None
        self._reads = Lane("reads", self._answer)
        self._writes = Lane("writes", self._answer)

    def run(self) -> int:
        """The exit code: 0 after a close or when the engine is gone, 1 after a failed set-up."""
        while True:
            packet = self._channel.recv(_PACKET)
            if not packet:
                # The engine is gone: there is nobody to close orderly for, and a close could block.
                return 0
            request = messages.decode_request(packet)
            match request:
                case messages.Open():
                    if not self._open(request):
                        return 1
                case messages.Close():
                    self._close(request)
                    return 0
                case messages.Ping():
                    self._reply(messages.Reply(request.id, [0]))
                case messages.Put():
                    self._writes.add(request)
                case _:
                    self._reads.add(request)

    def _open(self, request: messages.Open) -> bool:
        started = time.monotonic()
        try:
            client = StoreClient(request)
            code, error = client.setup(request), ""
        except Exception as failure:
            code, error = -1, f"{type(failure).__name__}: {failure}"
        if code == 0:
            self._client = client
        self._reply(messages.Reply(request.id, [code], time.monotonic() - started, error))
        return code == 0

    def _close(self, request: messages.Close) -> None:
        self._reads.finish()
        self._writes.finish()
        # No Mooncake close(): it takes a second, and a client without a segment leaves nothing at the master. All
        # calls have been answered; the end of the process is what makes another one impossible.
        self._reply(messages.Reply(request.id, [0]))

    def _answer(self, request: messages.Request) -> None:
        started = time.monotonic()
        codes: list[int] = []
        error = ""
        try:
            codes = self._call(request)
        except _Refused as refused:
            codes = [refused.code]
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"
        self._reply(messages.Reply(request.id, codes, time.monotonic() - started, error))

    def _call(self, request: messages.Request) -> list[int]:
        if self._client is None:
            raise RuntimeError("the store client is not open")
        match request:
            case messages.Exist():
                return self._client.exist(request)
            case messages.Get():
                return self._client.get(request)
            case messages.Put():
                return self._client.put(request)
            case messages.Measure():
                return self._client.measure(request.size)
        raise TypeError(f"{type(request).__name__} is not a store call")

    def _reply(self, reply: messages.Reply) -> None:
        with self._sending, contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._channel.send(messages.encode(reply))


def _silence_mooncake() -> None:
    """Mooncake writes lines about every miss and refusal to descriptor 2, and has no level above that.

    They are answered as codes and counted; MOONPOOL_STORE_LOG=1 shows them. Python's own errors stay visible.
    """
    if os.environ.get("MOONPOOL_STORE_LOG"):
        return
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)


def main(arguments: list[str]) -> NoReturn:
    # Without its engine this process has nothing to do, however the engine ended.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The engine decides when this process ends: Ctrl-C in a terminal reaches the whole group.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _silence_mooncake()
    server = Server(socket.socket(fileno=int(arguments[0])))
    code = server.run()
    sys.stderr.flush()
    # Mooncake's threads outlive this function, and its destructors take a second: end without them.
    os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1:])
