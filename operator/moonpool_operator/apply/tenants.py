"""One call to the master about one tenant, and what it answered."""

from __future__ import annotations

from moonpool_operator.clients.mooncake import DeleteAnswer, MooncakeAdmin, TenantFigures
from moonpool_operator.plan.tenants import Call


async def make_call(admin: MooncakeAdmin, call: Call) -> TenantFigures | DeleteAnswer | int:
    """Raises MasterUnavailable. Every call is idempotent, so a lost answer is asked for again."""
    match call.verb:
        case "register" | "resize":
            return await admin.set_quota(call.tenant, call.quota)
        case "fence":
            return await admin.fence(call.tenant)
        case "remove":
            return await admin.remove_all(call.tenant)
        case "delete":
            return await admin.delete(call.tenant)
