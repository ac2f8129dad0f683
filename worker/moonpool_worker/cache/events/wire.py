"""vLLM's KV events as bytes: one msgpack array ``[timestamp, [events], data parallel rank]`` per batch.

A block's hash is the first 64 bits of its SHA-256 link, big-endian and *unsigned*, as vLLM's and TokenSpeed's integers
are; smg's gateway folds either sign to the same bit pattern. Fields that an older subscriber does not know come last
in an array, and it ignores them; ``reason`` is ours and comes after all of vLLM's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from moonpool_worker.cache.events.sink import Tier
from moonpool_worker.cache.extra_keys import read_keys

#: How vLLM and smg call the tiers.
MEDIUM: dict[Tier, str] = {"l1": "GPU", "l2": "CPU"}


@dataclass(frozen=True, slots=True)
class Stored:
    """A run of blocks, each the continuation of the one before; ``parent`` is what the first continues."""

    tier: Tier
    links: list[bytes]
    parent: bytes | None
    token_ids: list[int]
    block_size: int
    salt: bytes
    reason: str


@dataclass(frozen=True, slots=True)
class Removed:
    tier: Tier
    links: list[bytes]
    reason: str


@dataclass(frozen=True, slots=True)
class Cleared:
    """No tier holds anything any more."""


Event = Stored | Removed | Cleared
Layout = Literal["array", "map"]


def event_hash(link: bytes) -> int:
    """0 to 2**64 - 1."""
    return int.from_bytes(link[:8], "big")


def encode_batch(timestamp: float, events: Sequence[Event], rank: int, layout: Layout = "array") -> bytes:
    """``timestamp`` in seconds since 1970."""
    shape = _as_array if layout == "array" else _as_map
    return msgspec.msgpack.encode([timestamp, [shape(event) for event in events], rank])


def _fields(event: Event) -> list[tuple[str, Any]]:
    """Names and values in the order of vLLM's arrays, None for what does not apply here."""
    if isinstance(event, Stored):
        return [
            ("block_hashes", [event_hash(link) for link in event.links]),
            ("parent_block_hash", None if event.parent is None else event_hash(event.parent)),
            ("token_ids", event.token_ids),
            ("block_size", event.block_size),
            ("lora_id", None),
            ("medium", MEDIUM[event.tier]),
            ("lora_name", None),
            ("extra_keys", _extra_keys(event)),
            ("group_idx", None),
            ("kv_cache_spec_kind", None),
            ("kv_cache_spec_sliding_window", None),
            ("locality", None),
            ("ownership", None),
            ("session_id", None),
            ("reason", event.reason),
        ]
    if isinstance(event, Removed):
        return [
            ("block_hashes", [event_hash(link) for link in event.links]),
            ("medium", MEDIUM[event.tier]),
            ("group_idx", None),
            ("locality", None),
            ("ownership", None),
            ("reason", event.reason),
        ]
    return []


def _extra_keys(event: Stored) -> list[list[str] | None] | None:
    """As vLLM: the salt belongs to the first block of a text, and its continuations inherit it."""
    if not event.salt or event.parent is not None:
        return None
    keys = [value.decode(errors="backslashreplace") for _, value in read_keys(event.salt)]
    return [keys, *[None] * (len(event.links) - 1)]


def _tag(event: Event) -> str:
    return {Stored: "BlockStored", Removed: "BlockRemoved", Cleared: "AllBlocksCleared"}[type(event)]


def _as_array(event: Event) -> list[Any]:
    return [_tag(event), *(value for _, value in _fields(event))]


def _as_map(event: Event) -> dict[str, Any]:
    required = ("parent_block_hash", "lora_id", "lora_name")
    return {"type": _tag(event)} | {
        name: value for name, value in _fields(event) if value is not None or name in required
    }
