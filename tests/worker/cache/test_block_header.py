from __future__ import annotations

import pytest
from moonpool_worker.cache.block_header import (
    HEADER_BYTES,
    Identity,
    Mismatch,
    erase_header,
    key_digest,
    read_identity,
    verify,
    verify_identity,
    write_header,
)
from moonpool_worker.cache.store_tier.keys import store_key

NAME = key_digest(store_key("a" * 64, b"\1" * 32))
LINK, PARENT = b"\1" * 32, b"\2" * 32
PAYLOAD = 1000


def slot(name: bytes = NAME, payload: bytes = b"k" * PAYLOAD) -> bytearray:
    data = bytearray(HEADER_BYTES) + payload
    write_header(memoryview(data), Identity(name, 3, LINK, PARENT), len(payload))
    return data


def test_a_good_slot_verifies() -> None:
    assert verify(memoryview(slot()), NAME, PAYLOAD) is None


@pytest.mark.parametrize(
    ("offset", "reason"),
    [
        (0, Mismatch.MAGIC),
        (8, Mismatch.VERSION),
        (12, Mismatch.VERSION),
        (14, Mismatch.CHECKSUM),
        (16, Mismatch.LENGTH),
        (24, Mismatch.CHECKSUM),
        (32, Mismatch.KEY),
        (63, Mismatch.KEY),
        (64, Mismatch.CHECKSUM),
        (127, Mismatch.CHECKSUM),
        (HEADER_BYTES, Mismatch.CHECKSUM),
        (HEADER_BYTES + PAYLOAD - 1, Mismatch.CHECKSUM),
    ],
)
def test_every_flipped_bit_is_seen_and_named(offset: int, reason: Mismatch) -> None:
    data = slot()
    data[offset] ^= 1
    assert verify(memoryview(data), NAME, PAYLOAD) is reason


def test_another_blocks_good_bytes_are_a_key_mismatch() -> None:
    other = key_digest(store_key("a" * 64, b"\2" * 32))
    assert verify(memoryview(slot(other)), NAME, PAYLOAD) is Mismatch.KEY


def test_the_checksum_covers_the_key() -> None:
    """A header whose digest was overwritten with the right one still fails: the payload was another key's."""
    other = key_digest(store_key("b" * 64, b"\1" * 32))
    data = slot(other)
    data[32:64] = NAME
    assert verify(memoryview(data), NAME, PAYLOAD) is Mismatch.CHECKSUM


def test_untouched_memory_is_no_block() -> None:
    assert verify(memoryview(bytearray(HEADER_BYTES + PAYLOAD)), NAME, PAYLOAD) is Mismatch.MAGIC


def test_the_key_is_the_documented_one() -> None:
    assert store_key("a" * 64, b"\xff" * 32, rank=1) == f"mp1-{'a' * 64}_{'ff' * 32}|g0|o0|r1"


def test_a_header_says_whose_block_it_is() -> None:
    assert read_identity(memoryview(slot())) == Identity(NAME, 3, LINK, PARENT)
    data = bytearray(HEADER_BYTES)
    write_header(memoryview(data), Identity(NAME, 0, LINK, None), 0)
    assert read_identity(memoryview(data)) == Identity(NAME, 0, LINK, None)


def test_an_erased_header_is_nobodys() -> None:
    data = slot()
    erase_header(memoryview(data))
    assert read_identity(memoryview(data)) is None
    assert verify(memoryview(data), NAME, PAYLOAD) is Mismatch.MAGIC


def test_identity_alone_does_not_read_the_payload() -> None:
    data = slot()
    data[HEADER_BYTES] ^= 1
    assert verify_identity(memoryview(data), NAME, PAYLOAD) is None
    data[40] ^= 1
    assert verify_identity(memoryview(data), NAME, PAYLOAD) is Mismatch.KEY
