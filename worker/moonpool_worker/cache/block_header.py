"""The 128 bytes before every block in L2 and L3: whose bytes these are, and whether they are whole.

Measured why (Mooncake 0.3.13): a read that races with a forced removal returns another object's bytes with a good
return code, and a header without the full key let some of them through. All integers are little-endian::

    offset  0   8   magic "MOONKVB1"
            8   4   format version (2)
           12   2   header length (128)
           14   2   cache group
           16   8   payload length in bytes
           24   8   xxh3_64 over everything else: the header without magic, version, length and this field; the payload
           32  32   SHA-256 of the full store key (namespace, block hash, group, offset, rank)
           64  32   the block's own link of the hash chain
           96  32   the link before it, zeros for the first

The links let an index be rebuilt from slots alone: what they say is proven by the store key, which names them too.
"""

from __future__ import annotations

import enum
import hashlib
import struct
from dataclasses import dataclass

import xxhash

HEADER_BYTES = 128
MAGIC = b"MOONKVB1"
FORMAT_VERSION = 2

_HEADER = struct.Struct("<8sIHHQQ32s32s32s")
_CHECKED = struct.Struct("<HQ32s32s32s")
_NO_LINK = bytes(32)
assert _HEADER.size == HEADER_BYTES


class Mismatch(enum.Enum):
    """Why a slot is not the block that was asked for; every one of them is a miss."""

    MAGIC = "magic"
    VERSION = "version"
    KEY = "key"
    LENGTH = "length"
    CHECKSUM = "checksum"


@dataclass(frozen=True, slots=True)
class Identity:
    """``name``: digest of the full store key; ``digest``, ``parent``: the block's link and the one before it."""

    name: bytes
    group: int
    digest: bytes
    parent: bytes | None


def key_digest(store_key: str) -> bytes:
    """SHA-256 (32 bytes) of a full store key."""
    return hashlib.sha256(store_key.encode()).digest()


def write_header(slot: memoryview, identity: Identity, payload_bytes: int) -> None:
    """Write the header in front of a payload that is already in the slot."""
    fields = (identity.group, payload_bytes, identity.name, identity.digest, identity.parent or _NO_LINK)
    check = _checksum(slot, *fields)
    group, length, *links = fields
    _HEADER.pack_into(slot, 0, MAGIC, FORMAT_VERSION, HEADER_BYTES, group, length, check, *links)


def erase_header(slot: memoryview) -> None:
    """The slot holds no block from now on: before its payload is overwritten."""
    slot[:8] = bytes(8)


def read_identity(slot: memoryview) -> Identity | None:
    """Whose block a slot claims to be, unchecked; None when it claims nothing."""
    magic, version, header_bytes, group, _, _, name, digest, parent = _HEADER.unpack_from(slot, 0)
    if magic != MAGIC or version != FORMAT_VERSION or header_bytes != HEADER_BYTES:
        return None
    return Identity(name, group, digest, None if parent == _NO_LINK else parent)


def verify(slot: memoryview, name: bytes, payload_bytes: int) -> Mismatch | None:
    """None when the slot holds exactly the block of ``name``, a :func:`key_digest`; else the first reason found."""
    reason = verify_identity(slot, name, payload_bytes)
    if reason is not None:
        return reason
    _, _, _, group, length, check, stored, digest, parent = _HEADER.unpack_from(slot, 0)
    if check != _checksum(slot, group, length, stored, digest, parent):
        return Mismatch.CHECKSUM
    return None


def verify_identity(slot: memoryview, name: bytes, payload_bytes: int) -> Mismatch | None:
    """As :func:`verify` without reading the payload: for a slot that this process has filled or verified."""
    magic, version, header_bytes, _, length, _, stored, _, _ = _HEADER.unpack_from(slot, 0)
    if magic != MAGIC:
        return Mismatch.MAGIC
    if version != FORMAT_VERSION or header_bytes != HEADER_BYTES:
        return Mismatch.VERSION
    if stored != name:
        return Mismatch.KEY
    if length != payload_bytes:
        return Mismatch.LENGTH
    return None


def _checksum(slot: memoryview, group: int, length: int, name: bytes, digest: bytes, parent: bytes) -> int:
    state = xxhash.xxh3_64(_CHECKED.pack(group, length, name, digest, parent))
    state.update(slot[HEADER_BYTES : HEADER_BYTES + length])
    return state.intdigest()
