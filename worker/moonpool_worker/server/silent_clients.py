"""Clients that neither read nor go away: the kernel ends their connections."""

from __future__ import annotations

import socket

#: Longer than any pause of a client that is alive.
PATIENCE_SECONDS = 120.0


def drop_silent_clients(listener: socket.socket, seconds: float = PATIENCE_SECONDS) -> None:
    """Connections accepted by ``listener`` end when what was sent waits unread for ``seconds``: as if the client left.

    A closed window counts as silence too (TCP_USER_TIMEOUT, RFC 5482, as Linux does it). Without it a client that stops
    reading in the middle of a stream holds its connection for ever, since its system answers every probe.
    """
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(seconds * 1000))
