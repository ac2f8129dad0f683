"""The engine's handle of the L3 process: start it, exchange packets without blocking, end it."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import time
from collections import deque

import msgspec

from moonpool_worker.cache.store_tier import messages

_MODULE = "moonpool_worker.cache.store_tier.process"
_PACKET = 1 << 18

#: Short time-outs inside Mooncake, so that most faults are answers and not a killed process.
CLIENT_ENVIRONMENT = {
    "MC_RPC_TIMEOUT_MS": "2000",
    "MC_RPC_CONNECT_TIMEOUT_MS": "500",
    "MC_STORE_CLIENT_SETUP_RETRIES": "1",
    "MC_TCP_STATUS_TIMEOUT_SEC": "3",
    # Both are noisy about misses and refusals, which are counted here.
    "GLOG_logtostderr": "1",
    "GLOG_minloglevel": "2",
    "MC_LOG_LEVEL": "ERROR",
    "MC_YLT_LOG_LEVEL": "critical",
    "MC_STORE_CLIENT_METRIC": "0",
    # glibc would reserve an arena per thread; Mooncake starts dozens.
    "MALLOC_ARENA_MAX": "2",
    "OPENBLAS_NUM_THREADS": "1",
}


class ClientProcess:
    """One child over the memfd ``arena_fd``. OSError when it cannot be started."""

    def __init__(self, arena_fd: int, environment: dict[str, str] | None = None) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", _MODULE, str(theirs.fileno())],
                pass_fds=(theirs.fileno(), arena_fd),
                stdin=subprocess.DEVNULL,
                env=os.environ | CLIENT_ENVIRONMENT | (environment or {}),
            )
        ours.setblocking(False)
        self._channel = ours
        self._outbox: deque[bytes] = deque()

    @property
    def pid(self) -> int:
        return self._process.pid

    def fileno(self) -> int:
        return self._channel.fileno()

    def send(self, request: messages.Request) -> None:
        """Never blocks: what the child does not take yet waits in the outbox."""
        self._outbox.append(messages.encode(request))
        self._flush()

    def receive(self) -> tuple[list[messages.Reply], bool]:
        """The answers that are there, and whether the child is still alive."""
        self._flush()
        replies: list[messages.Reply] = []
        while True:
            try:
                packet = self._channel.recv(_PACKET)
            except BlockingIOError:
                return replies, True
            except ConnectionResetError:
                return replies, False
            if not packet:
                return replies, False
            try:
                replies.append(messages.decode_reply(packet))
            except msgspec.MsgspecError:
                return replies, False  # out of its mind: as good as dead

    def wait_readable(self, seconds: float) -> None:
        poller = select.poll()
        poller.register(self._channel.fileno(), select.POLLIN)
        poller.poll(max(0.0, seconds) * 1000)

    def wait_exit(self, seconds: float) -> int | None:
        """The exit code, or None when it still runs after ``seconds``."""
        deadline = time.monotonic() + seconds
        while (code := self._process.poll()) is None and time.monotonic() < deadline:
            time.sleep(0.002)
        return code

    def kill(self) -> int:
        """End the child and reap it: from then on nobody writes to the arena. Returns its exit code."""
        self._process.kill()
        code = self._process.wait()
        self._channel.close()
        return code

    def _flush(self) -> None:
        while self._outbox:
            try:
                self._channel.send(self._outbox[0])
            except BlockingIOError:
                return
            except (BrokenPipeError, ConnectionResetError, ConnectionRefusedError):
                self._outbox.clear()  # receive() reports the end
                return
            self._outbox.popleft()
