"""What else than its tokens tells one text's KV from another's: the ``salt`` of the hash chain.

Kinds in use: ``cache_salt`` (the caller's wish to share with nobody else), ``adapter`` (its digest), ``tenant``, and
``image``, ``audio``, ``video``: the full SHA-256 of each input that placeholder tokens stand for, in order. A shortened
digest would let two inputs share KV: of 30-bit ids, some 30,000 inputs have an even chance of a pair.

Framing, all integers little-endian u32: count | per key: length, kind | length, value. So no two lists have the same
bytes. No keys at all are no bytes: the plain text's chain is what it always was.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

KINDS = frozenset({"cache_salt", "adapter", "tenant", "image", "audio", "video"})


def frame_keys(keys: Sequence[tuple[str, bytes]]) -> bytes:
    """``(kind, value)`` in the order that they are to count in; empty values do not count. ValueError for a kind that
    is not known: a typing error would let two texts share what they should not."""
    parts = [(kind, value) for kind, value in keys if value]
    if unknown := {kind for kind, _ in parts} - KINDS:
        raise ValueError(f"unknown extra keys {', '.join(sorted(unknown))}; known are {', '.join(sorted(KINDS))}")
    if not parts:
        return b""
    framed = struct.pack("<I", len(parts))
    for kind, value in parts:
        name = kind.encode()
        framed += struct.pack("<I", len(name)) + name + struct.pack("<I", len(value)) + value
    return framed


def read_keys(framed: bytes) -> list[tuple[str, bytes]]:
    """The keys again, without the empty ones."""
    keys: list[tuple[str, bytes]] = []
    at = 4
    while at < len(framed):
        parts = []
        for _ in range(2):
            (length,) = struct.unpack_from("<I", framed, at)
            parts.append(framed[at + 4 : at + 4 + length])
            at += 4 + length
        keys.append((parts[0].decode(), parts[1]))
    return keys
