"""How the store's mounted memory is shared among its tenants; bytes.

Mooncake scales every tenant down when the sum of the quotas exceeds what is mounted, and evicts the live ones at
once, so the sum never exceeds it. A draining tenant keeps what it uses and no more: what it does not use goes to
the tenant that takes its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

#: Quotas move in steps of this share of the capacity, so that small changes of use cause no calls.
_STEPS = 64
#: What live tenants get at the least, together, however much draining ones hold.
_LIVE_SHARE = 0.25


@dataclass(frozen=True)
class Share:
    """One tenant's wish: ``wanted`` bytes or an equal share (None)."""

    tenant: str
    wanted: int | None
    draining: bool
    charged: int


def share_out(capacity: int, shares: Sequence[Share], reserved: int = 0) -> dict[str, int]:
    """Quota by tenant; their sum with ``reserved`` (bytes that fenced tenants still hold) is within ``capacity``."""
    if capacity <= 0 or not shares:
        return {}
    step = max(1, capacity // _STEPS)
    live = [share for share in shares if not share.draining]
    draining = [share for share in shares if share.draining]
    left = max(0, capacity - reserved)
    if not live:
        return _equal(draining, left, step)
    quotas: dict[str, int] = {}
    most = left - int(left * _LIVE_SHARE)
    held = {share.tenant: -(-share.charged // step) * step for share in draining}
    total = sum(held.values())
    for tenant, size in held.items():
        quotas[tenant] = max(1, size if total <= most else int(size * most / total))
    return quotas | _equal(live, left - sum(quotas.values()), step)


def _equal(shares: Sequence[Share], left: int, step: int) -> dict[str, int]:
    """Stated wishes first (scaled down together when they are too many), then equal shares of the rest."""
    left = max(left, len(shares))
    quotas: dict[str, int] = {}
    stated = [(share, share.wanted) for share in shares if share.wanted is not None]
    unstated = [share for share in shares if share.wanted is None]
    # Whoever states nothing still gets something: an equal share of a quarter at the least.
    most = left if not unstated else left - max(len(unstated), int(left * _LIVE_SHARE))
    total = sum(wish for _, wish in stated)
    for share, wish in stated:
        quotas[share.tenant] = max(1, wish if total <= most else int(wish * most / total))
    rest = left - sum(quotas.values())
    for share in unstated:
        quotas[share.tenant] = max(1, _floor(rest // len(unstated), step))
    return quotas


def _floor(size: int, step: int) -> int:
    return size // step * step if size >= step else size
