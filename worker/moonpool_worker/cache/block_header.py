"""The 128 bytes before every block in L2 and L3: whose bytes these are, and whether they are whole.

Measured why (Mooncake 0.3.13): a read that races with a forced removal returns another object's bytes with a good
return code, and a header without the full key let some of them through. All integers are little-endian::

    offset  0   8   magic "MOONKVB1"
            8   4   format version (1)
           12   4   header length (128)
           16   8   payload length in bytes
           24   8   xxh3_64 over (key digest | payload length | payload)
           32  32   SHA-256 of the full store key (namespace, block hash, group, offset, rank)
           64  64   zero
"""

from __future__ import annotations

import enum
import hashlib
import struct

import xxhash

HEADER_BYTES = 128
MAGIC = b"MOONKVB1"
FORMAT_VERSION = 1

_HEADER = struct.Struct("<8sIIQQ32s64x")
_LENGTH = struct.Struct("<Q")
assert _HEADER.size == HEADER_BYTES


class Mismatch(enum.Enum):
    """Why a slot is not the block that was asked for; every one of them is a miss."""

    MAGIC = "magic"
    VERSION = "version"
    KEY = "key"
    LENGTH = "length"
    CHECKSUM = "checksum"


def key_digest(store_key: str) -> bytes:
    """SHA-256 (32 bytes) of a full store key."""
    return hashlib.sha256(store_key.encode()).digest()


def write_header(slot: memoryview, digest: bytes, payload_bytes: int) -> None:
    """Write the header in front of a payload that is already in the slot."""
    check = _checksum(slot, digest, payload_bytes)
    _HEADER.pack_into(slot, 0, MAGIC, FORMAT_VERSION, HEADER_BYTES, payload_bytes, check, digest)


def verify(slot: memoryview, digest: bytes, payload_bytes: int) -> Mismatch | None:
    """None when the slot holds exactly the block of ``digest``, else the first reason found."""
    reason = verify_identity(slot, digest, payload_bytes)
    if reason is not None:
        return reason
    if _HEADER.unpack_from(slot, 0)[4] != _checksum(slot, digest, payload_bytes):
        return Mismatch.CHECKSUM
    return None


def verify_identity(slot: memoryview, digest: bytes, payload_bytes: int) -> Mismatch | None:
    """As :func:`verify` without reading the payload: for a slot that was verified when it was filled."""
    magic, version, header_bytes, length, _, stored = _HEADER.unpack_from(slot, 0)
    if magic != MAGIC:
        return Mismatch.MAGIC
    if version != FORMAT_VERSION or header_bytes != HEADER_BYTES:
        return Mismatch.VERSION
    if stored != digest:
        return Mismatch.KEY
    if length != payload_bytes:
        return Mismatch.LENGTH
    return None


def _checksum(slot: memoryview, digest: bytes, payload_bytes: int) -> int:
    state = xxhash.xxh3_64(digest + _LENGTH.pack(payload_bytes))
    state.update(slot[HEADER_BYTES : HEADER_BYTES + payload_bytes])
    return state.intdigest()
