"""Mooncake's error codes (its ``types.h``): names for people, and what they say about the store."""

from __future__ import annotations

NAMES = {
    -1: "INTERNAL_ERROR",
    -10: "BUFFER_OVERFLOW",
    -101: "SEGMENT_NOT_FOUND",
    -200: "NO_AVAILABLE_HANDLE",
    -400: "INVALID_KEY",
    -500: "WRITE_FAIL",
    -600: "INVALID_PARAMS",
    -601: "ILLEGAL_CLIENT",
    -703: "REPLICA_IS_NOT_READY",
    -704: "OBJECT_NOT_FOUND",
    -705: "OBJECT_ALREADY_EXISTS",
    -706: "OBJECT_HAS_LEASE",
    -707: "LEASE_EXPIRED",
    -800: "TRANSFER_FAIL",
    -900: "RPC_FAIL",
    -901: "RPC_TIMEOUT",
    -1010: "UNAVAILABLE_IN_CURRENT_STATUS",
    -1011: "UNAVAILABLE_IN_CURRENT_MODE",
    -1700: "TENANT_QUOTA_EXCEEDED",
    -1701: "TENANT_NOT_REGISTERED",
    -1702: "TENANT_NOT_EMPTY",
}

NOT_FOUND = -704
NO_SPACE = -200
OVER_QUOTA = -1700
NOT_REGISTERED = -1701

#: The store answered, and the answer is about the block or the tenant: nothing is wrong with the way to the store.
_ANSWERS = frozenset({-200, -400, -600, -703, -704, -705, -706, -708, NOT_REGISTERED, OVER_QUOTA})


def describe(code: int) -> str:
    return f"{NAMES.get(code, 'error')} ({code})"


def is_fault(code: int) -> bool:
    """Whether the code says that the store, or the way to it, is broken."""
    return code < 0 and code not in _ANSWERS
