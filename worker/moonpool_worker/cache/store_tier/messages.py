"""What engine and L3 process say to each other: one msgpack array per packet of a SOCK_SEQPACKET pair."""

from __future__ import annotations

import msgspec

#: Packets stay well below the default socket buffer (208 KiB), which is their limit.
MAX_KEYS = 4096


class Open(msgspec.Struct, tag="open", array_like=True):
    """Map the arena (``arena_bytes`` behind ``arena_fd``) and set up a Mooncake client of ``tenant``.

    A process is opened once; another tenant needs another process.
    """

    id: int
    namespace: str
    tenant: str
    master: str
    hostname: str
    protocol: str
    device: str
    local_buffer_bytes: int
    arena_fd: int
    arena_bytes: int


class Exist(msgspec.Struct, tag="exist", array_like=True):
    """Which blocks are there: code 1, 0, or negative per hash."""

    id: int
    hashes: list[bytes]


class Get(msgspec.Struct, tag="get", array_like=True):
    """Read blocks to byte ``offsets`` of the arena: the bytes read, or a negative code, per hash."""

    id: int
    hashes: list[bytes]
    offsets: list[int]
    size: int


class Put(msgspec.Struct, tag="put", array_like=True):
    """Write blocks from byte ``offsets`` of the arena: 0 or a negative code per hash."""

    id: int
    hashes: list[bytes]
    offsets: list[int]
    size: int


class Ping(msgspec.Struct, tag="ping", array_like=True):
    """Answered by the process itself, without the store."""

    id: int


class Close(msgspec.Struct, tag="close", array_like=True):
    """Answer all calls that are under way, then this, then exit."""

    id: int


Request = Open | Exist | Get | Put | Ping | Close


class Reply(msgspec.Struct, array_like=True):
    """The answer to request ``id``; ``seconds`` is the time inside Mooncake."""

    id: int
    codes: list[int]
    seconds: float = 0.0
    error: str = ""


encode = msgspec.msgpack.Encoder().encode
decode_request = msgspec.msgpack.Decoder(Request).decode
decode_reply = msgspec.msgpack.Decoder(Reply).decode
