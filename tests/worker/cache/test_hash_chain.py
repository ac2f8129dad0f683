from __future__ import annotations

import hashlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from moonpool_worker.cache.hash_chain import hash_chain, root_digest

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def test_framing_is_the_documented_one() -> None:
    root = hashlib.sha256(b"moonpool/prefix/1\n" + struct.pack("<II", 2, 4) + b"salt").digest()
    first = hashlib.sha256(root + struct.pack("<II", 7, 8)).digest()
    second = hashlib.sha256(first + struct.pack("<II", 9, 10)).digest()
    assert root_digest(2, b"salt") == root
    assert hash_chain([7, 8, 9, 10, 11], 2, b"salt") == [first, second]


@given(TOKENS, st.integers(0, 12))
def test_growing_a_known_chain_is_hashing_anew(tokens: list[int], known: int) -> None:
    whole = hash_chain(tokens, 4)
    assert hash_chain(tokens, 4, known=whole[:known]) == whole
    assert len(whole) == len(tokens) // 4


@given(TOKENS, TOKENS)
def test_links_are_equal_exactly_where_the_text_is(left: list[int], right: list[int]) -> None:
    for page, (a, b) in enumerate(zip(hash_chain(left, 4), hash_chain(right, 4), strict=False), 1):
        assert (a == b) == (left[: 4 * page] == right[: 4 * page])


def test_salt_and_granularity_change_every_link() -> None:
    tokens = list(range(8))
    assert not set(hash_chain(tokens, 4)) & set(hash_chain(tokens, 4, b"x"))
    assert hash_chain(tokens, 8)[0] not in hash_chain(tokens, 4)


@pytest.mark.parametrize("bad", [-1, 2**32])
def test_a_token_id_is_a_u32(bad: int) -> None:
    with pytest.raises((OverflowError, ValueError)):
        hash_chain([bad] * 4, 4)
