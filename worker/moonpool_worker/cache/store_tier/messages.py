"""What engine and L3 process say to each other: one msgpack array per packet of a SOCK_SEQPACKET pair."""

from __future__ import annotations

import msgspec

#: Packets stay well below the default socket buffer (208 KiB), which is their limit: 2,048 blocks take 110 KB at most.
MAX_KEYS = 2048


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


class Measure(msgspec.Struct, tag="measure", array_like=True):
    """Write an object of ``size`` bytes of this process's own, read it back, and remove it.

    Three codes: 0 or negative, the microseconds of a call that moves no bytes, and those of the read.
    """

    id: int
    size: int


class Exist(msgspec.Struct, tag="exist", array_like=True):
    """Which blocks, each named by its cache group and hash, are there: code 1, 0, or negative for each."""

    id: int
    groups: list[int]
    hashes: list[bytes]


class Get(msgspec.Struct, tag="get", array_like=True):
    """Read blocks of ``sizes`` bytes to byte ``offsets`` of the arena: the bytes read, or a negative code, for each."""

    id: int
    groups: list[int]
    hashes: list[bytes]
    offsets: list[int]
    sizes: list[int]


class Put(msgspec.Struct, tag="put", array_like=True):
    """Write blocks of ``sizes`` bytes from byte ``offsets`` of the arena: 0 or a negative code for each."""

    id: int
    groups: list[int]
    hashes: list[bytes]
    offsets: list[int]
    sizes: list[int]


class Ping(msgspec.Struct, tag="ping", array_like=True):
    """Answered by the process itself, without the store."""

    id: int


class Close(msgspec.Struct, tag="close", array_like=True):
    """Answer all calls that are under way, then this, then exit."""

    id: int


Request = Open | Measure | Exist | Get | Put | Ping | Close


class Reply(msgspec.Struct, array_like=True):
    """The answer to request ``id``; ``seconds`` is the time inside Mooncake."""

    id: int
    codes: list[int]
    seconds: float = 0.0
    error: str = ""


encode = msgspec.msgpack.Encoder().encode
decode_request = msgspec.msgpack.Decoder(Request).decode
decode_reply = msgspec.msgpack.Decoder(Reply).decode
