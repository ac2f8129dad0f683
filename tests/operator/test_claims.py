"""Claims: wanted, baking, released, and what the store's ledger says then."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from moonpool_api.inference_service import FlushProof, KVNamespaceStatus
from moonpool_api.kv_store import KVStoreStatus, TenantStatus
from moonpool_api.names import tenant_name
from moonpool_operator.observe.model import StoreView
from moonpool_operator.plan.claims import BakePolicy, NeededNamespace, pending, plan_claims

NOW = datetime(2026, 12, 1, 12, tzinfo=UTC)
A, B = "a" * 64, "b" * 64
TA = tenant_name(A, 0)


def stores(state: str = "Registered", claimed_by: tuple[str, ...] = (), proof=None) -> dict[str, StoreView]:
    entry = TenantStatus(name=TA, namespace=A, state=state, claimed_by=list(claimed_by), proof=proof)  # type: ignore[arg-type]
    return {"kv": StoreView("kv", True, False, KVStoreStatus(tenants=[entry]))}


def claim(state: str = "Active", **changes: object) -> KVNamespaceStatus:
    return KVNamespaceStatus(hash=A, store="kv", tenant=TA, state=state, since="x", **changes)  # type: ignore[arg-type]


def need(namespace: str = A, current: bool = True) -> NeededNamespace:
    return NeededNamespace(namespace, "kv", "r", "v", current)


def policy(complete: bool = True, flush: str = "AfterBake", paused: bool = False) -> BakePolicy:
    return BakePolicy(flush, 60, complete, paused)


def states(before, needed, policy_=None, stores_=None, now=NOW) -> list[tuple[str, str]]:
    after = plan_claims(before, needed, stores_ or stores(), policy_ or policy(), now)
    return [(each.hash[0], each.state) for each in after]


def test_a_new_namespace_is_claimed_and_takes_the_tenant_of_the_ledger() -> None:
    assert plan_claims([], [need()], {}, policy(), NOW)[0].tenant == ""
    assert plan_claims([], [need()], stores(), policy(), NOW)[0].tenant == TA


def test_the_old_one_drains_while_its_pods_exist() -> None:
    assert states([claim()], [need(B), need(A, current=False)]) == [("a", "Draining"), ("b", "Active")]


def test_the_bake_begins_when_the_roll_is_complete() -> None:
    waiting = plan_claims([claim()], [need(B)], stores(), policy(complete=False), NOW)[0]
    assert waiting.state == "Draining" and waiting.bake_until is None
    baking = plan_claims([waiting], [need(B)], stores(), policy(), NOW)[0]
    assert baking.state == "Draining" and baking.bake_until == "2026-12-01T12:01:00Z"
    assert states([baking], [need(B)], now=NOW + timedelta(seconds=59))[0] == ("a", "Draining")
    assert states([baking], [need(B)], now=NOW + timedelta(seconds=60))[0] == ("a", "Released")


def test_the_next_edit_does_not_lengthen_a_bake() -> None:
    baking = claim("Draining", bake_until="2026-12-01T12:00:00Z")
    assert states([baking], [need(B)], policy(complete=False))[0] == ("a", "Released")


def test_immediately_ends_a_bake_that_runs() -> None:
    now = NOW + timedelta(microseconds=1)
    baking = claim("Draining", bake_until="2026-12-01T13:00:00Z")
    ending = plan_claims([baking], [need(B)], stores(), policy(flush="Immediately"), now)[0]
    assert ending.bake_until == "2026-12-01T12:00:01Z"
    later = NOW + timedelta(seconds=1, microseconds=1)
    assert states([ending], [need(B)], policy(flush="Immediately"), now=later)[0] == ("a", "Released")


@pytest.mark.parametrize(
    ("flush", "paused", "expected"),
    [("Immediately", False, "Released"), ("Keep", False, "Draining"), ("Immediately", True, "Draining")],
)
def test_flush_policy_and_pause(flush: str, paused: bool, expected: str) -> None:
    assert states([claim("Draining")], [need(B)], policy(flush=flush, paused=paused))[0] == ("a", expected)


def test_an_edit_back_takes_the_old_claim_up_until_its_tenant_is_fenced() -> None:
    for state in ("Draining", "Released"):
        assert states([claim(state)], [need()]) == [("a", "Active")]
    assert states([claim("Released")], [need()], stores_=stores("Fenced")) == [("a", "Fenced"), ("a", "Active")]
    fresh = plan_claims([claim("Released")], [need()], stores("Fenced"), policy(), NOW)[1]
    assert fresh.tenant == "", "the next epoch is the ledger's to give"


def test_the_ledger_moves_a_released_claim_on() -> None:
    proof = FlushProof(bytes_before=7)
    flushed = plan_claims([claim("Released")], [], stores("Flushed", proof=proof), policy(), NOW)[0]
    assert flushed.state == "Flushed" and flushed.proof == proof
    assert states([claim("Released")], [], stores_=stores("Lost")) == [("a", "Lost")]
    assert states([claim("Released")], [], stores_={"kv": StoreView("kv")}) == [("a", "Lost")]


def test_a_claim_that_never_had_a_tenant_leaves_nothing_behind() -> None:
    empty = KVNamespaceStatus(hash=B, store="kv", state="Draining", bake_until="2026-12-01T00:00:00Z")
    assert states([empty], []) == []


def test_a_tenant_that_lives_on_for_another_service_is_not_waited_for() -> None:
    assert pending(claim("Released"), "chat", stores())
    assert not pending(claim("Released"), "chat", stores(claimed_by=("other",)))


def test_history_is_cut() -> None:
    many = [claim("Flushed", revision=str(i)) for i in range(9)]
    assert [each.revision for each in plan_claims(many, [], stores("Flushed"), policy(), NOW)] == list("45678")
