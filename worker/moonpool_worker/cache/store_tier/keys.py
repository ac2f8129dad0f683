"""The name of a block in the store."""

from __future__ import annotations


def store_key(namespace: str, block_hash: bytes, group: int = 0, offset: int = 0, rank: int = 0) -> str:
    """``mp1-<namespace sha256>_<block hash>|g<group>|o<offset>|r<tp rank>``, both hashes as 64 hex digits."""
    return f"mp1-{namespace}_{block_hash.hex()}|g{group}|o{offset}|r{rank}"
