from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from moonpool_worker.cache.extra_keys import KINDS, frame_keys, read_keys
from moonpool_worker.cache.hash_chain import hash_chain

KEYS = st.lists(st.tuples(st.sampled_from(sorted(KINDS)), st.binary(min_size=1, max_size=3)), max_size=3)


def test_no_keys_leave_the_plain_chain_as_it_is() -> None:
    assert frame_keys([]) == frame_keys([("cache_salt", b"")]) == b""
    assert hash_chain(range(8), 4, frame_keys([])) == hash_chain(range(8), 4)


def test_the_framing_is_the_documented_one() -> None:
    expected = struct.pack("<II", 1, 6) + b"tenant" + struct.pack("<I", 2) + b"ab"
    assert frame_keys([("tenant", b"ab")]) == expected


@given(KEYS, KEYS)
def test_different_lists_are_different_bytes(left: list[tuple[str, bytes]], right: list[tuple[str, bytes]]) -> None:
    assert (frame_keys(left) == frame_keys(right)) == (left == right)
    assert read_keys(frame_keys(left)) == left


def test_the_same_value_of_another_kind_is_another_text() -> None:
    chains = [hash_chain(range(8), 4, frame_keys([(kind, b"x")])) for kind in sorted(KINDS)]
    assert len({link for chain in chains for link in chain}) == 2 * len(KINDS)


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown extra keys adaptor"):
        frame_keys([("adaptor", b"x")])
