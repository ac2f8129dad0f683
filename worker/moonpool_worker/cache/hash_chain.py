"""The identity of a block: one SHA-256 link per ``P`` tokens, each over its predecessor.

Framing, all integers little-endian::

    root   = SHA-256("moonpool/prefix/1\\n" | u32 P | u32 len(salt) | salt)
    link_i = SHA-256(link_{i-1} | P token ids as u32)          link_{-1} = root

Equal links mean equal text from the first token on, equal granularity and equal salt. The salt holds every extra key
of a request (cache salt, adapter, digests of images), framed by :mod:`extra_keys`. L1, L2 and L3 use the same 32 bytes.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

import numpy as np

DIGEST_BYTES = 32
_DOMAIN = b"moonpool/prefix/1\n"


def root_digest(granularity: int, salt: bytes = b"") -> bytes:
    return hashlib.sha256(_DOMAIN + struct.pack("<II", granularity, len(salt)) + salt).digest()


def hash_chain(
    token_ids: Sequence[int], granularity: int, salt: bytes = b"", known: Sequence[bytes] = ()
) -> list[bytes]:
    """One digest per full page of ``granularity`` tokens; tokens past the last full page are left out.

    ``known`` are the leading links of the same text and salt, so a growing text hashes only its new pages.
    OverflowError or ValueError when a token id is not a u32.
    """
    pages = len(token_ids) // granularity
    chain = list(known[:pages])
    done = len(chain)
    if done == pages:
        return chain
    raw = np.asarray(token_ids[done * granularity : pages * granularity], dtype="<u4").tobytes()
    parent = chain[-1] if chain else root_digest(granularity, salt)
    width = 4 * granularity
    for start in range(0, len(raw), width):
        parent = hashlib.sha256(parent + raw[start : start + width]).digest()
        chain.append(parent)
    return chain
