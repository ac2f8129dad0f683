"""A tenant's life, against plain numbers and against a real Mooncake master."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest
from moonpool_api.kv_store import RetiredEpoch, TenantStatus
from moonpool_api.names import tenant_name
from moonpool_operator.apply.tenants import make_call
from moonpool_operator.clients.mooncake import DeleteAnswer, MasterFigures, MooncakeAdmin, TenantFigures
from moonpool_operator.observe.model import Claim, Grant
from moonpool_operator.plan.tenants import Call, TenantPlan, plan_tenants, record

from tests.mooncake_fixture import MiB, RunningMooncake, available, running_mooncake

NOW = datetime(2026, 12, 1, tzinfo=UTC)
NS, OTHER = "a" * 64, "b" * 64
T0, T1 = tenant_name(NS, 0), tenant_name(NS, 1)
FIGURES = MasterFigures(capacity=1 << 30, used=0, keys=0, segments=1)
CLAIM = Claim("chat", NS)


#: Steps of a flush before its deletion is recorded.
BEFORE_DELETION = ("Fencing", "Removing", "WaitingForUnfinishedPuts")


def live(name: str, quota: int = 1 << 30, charged: int = 0) -> dict[str, TenantFigures]:
    return {name: TenantFigures(name, quota, quota, charged)}


def registered(**changes: object) -> TenantStatus:
    return TenantStatus(name=T0, namespace=NS, quota=1 << 30).model_copy(update=changes)


def plan(ledger, claims=(), grants=(), tenants=None, figures=FIGURES, retired=()) -> TenantPlan:
    return plan_tenants(ledger, list(retired), list(claims), grants, tenants, figures, NOW)


def test_a_claim_gets_a_tenant_of_epoch_0() -> None:
    made = plan([], [CLAIM], tenants={})
    assert made.calls == [Call("register", T0, 1 << 30)] and made.ledger == []
    ledger = record([], made.calls[0], TenantFigures(T0, 1 << 30, 1 << 30, 0), [CLAIM], NOW)
    assert ledger[0].state == "Registered" and ledger[0].service == "chat"
    assert plan(ledger, [CLAIM], tenants=live(T0)).calls == []


def test_nothing_is_registered_without_memory_or_master() -> None:
    nothing = MasterFigures(0, 0, 0, 0)
    for made in (plan([], [CLAIM], tenants={}, figures=nothing), plan([], [CLAIM], tenants=None, figures=None)):
        assert made.calls == [] and T0 in made.waiting


def test_a_namespace_that_comes_back_gets_the_next_epoch() -> None:
    made = plan([], [CLAIM], tenants={}, retired=[RetiredEpoch(namespace=NS, epoch=0)])
    assert [call.tenant for call in made.calls] == [T1]
    fenced = registered(state="Fenced", step="Removing")
    made = plan([fenced], [CLAIM], tenants=live(T0, 1, 100))
    assert ("register", T1) in [(call.verb, call.tenant) for call in made.calls], "a fenced tenant is not waited for"


def test_a_tenant_that_a_pod_was_granted_is_not_fenced() -> None:
    made = plan([registered()], grants=[Grant("chat-x", T0)], tenants=live(T0, charged=100))
    assert made.ledger[0].state == "Registered" and made.ledger[0].step == "InUse"
    assert "chat-x" in made.waiting[T0] and not [call for call in made.calls if call.verb == "fence"]


def test_the_fence_is_written_before_it_is_made_and_keeps_the_figures() -> None:
    made = plan([registered()], tenants=live(T0, charged=4096))
    assert made.ledger[0].state == "Fenced" and made.ledger[0].step == "Fencing"
    assert made.ledger[0].proof and made.ledger[0].proof.bytes_before == 4096
    assert [call.verb for call in made.calls] == ["fence"] and made.retired == [RetiredEpoch(namespace=NS, epoch=0)]


def test_with_the_store_down_the_fence_waits() -> None:
    made = plan([registered()], tenants=None, figures=None)
    assert made.ledger[0].state == "Registered" and made.calls == [] and "does not answer" in made.waiting[T0]


def test_after_a_recorded_deletion_a_tenant_that_is_gone_was_deleted_by_us() -> None:
    made = plan([registered(state="Fenced", step="Deleting")], tenants={})
    ledger = record(made.ledger, made.calls[0], DeleteAnswer(404, "OBJECT_NOT_FOUND"), [], NOW)
    assert ledger[0].state == "Flushed" and ledger[0].proof and ledger[0].proof.delete_status == 404


@pytest.mark.parametrize("entry", [{"state": "Registered"}, *({"state": "Fenced", "step": s} for s in BEFORE_DELETION)])
def test_a_tenant_to_flush_that_the_store_lost_is_registered_closed_and_deleted(entry: dict) -> None:
    made = plan([registered(**entry)], tenants={})
    assert made.ledger[0].state == "Fenced" and [call.verb for call in made.calls] == ["fence"]
    ledger = record(made.ledger, made.calls[0], TenantFigures(T0, 1, 1, 0), [], NOW)
    made = plan(ledger, tenants=live(T0, quota=1))
    assert [call.verb for call in made.calls] == ["delete"]
    (flushed,) = record(made.ledger, made.calls[0], DeleteAnswer(200, "{}"), [], NOW)
    assert flushed.state == "Flushed" and flushed.proof and flushed.proof.lost and flushed.proof.delete_status == 200


def test_a_master_that_came_back_empty_gets_its_tenants_again() -> None:
    made = plan([registered()], [CLAIM], tenants={})
    assert made.lost == (T0,) and [(call.verb, call.tenant) for call in made.calls] == [("register", T0)]


def test_tenants_that_the_ledger_forgot_are_taken_up() -> None:
    assert plan([], [CLAIM], tenants=live(T0)).ledger[0].state == "Registered"
    made = plan([], [], tenants=live(T0, quota=1, charged=10))
    assert made.ledger[0].state == "Fenced" and [call.verb for call in made.calls] == ["remove"]
    assert plan([], [], tenants=live("somebody-elses")).ledger == []


def test_the_old_quota_shrinks_before_the_new_tenant_is_registered() -> None:
    claims = [Claim("chat", NS, draining=True), Claim("chat", OTHER)]
    made = plan([registered()], claims, tenants=live(T0, charged=1 << 28))
    assert [(call.verb, call.quota) for call in made.calls] == [("resize", 1 << 28), ("register", 3 << 28)]


# --- a real master ---------------------------------------------------------------------------------------------


@dataclass
class Ledger:
    """The executor's loop without Kubernetes: plan, (write), call, record."""

    admin: MooncakeAdmin
    entries: list[TenantStatus] = field(default_factory=list)
    retired: list[RetiredEpoch] = field(default_factory=list)
    steps: list[str] = field(default_factory=list)

    async def look(self, claims=(), grants=()) -> TenantPlan:
        tenants, figures = await self.admin.tenants(), await self.admin.figures()
        made = plan_tenants(self.entries, self.retired, list(claims), grants, tenants, figures, datetime.now(UTC))
        self.entries, self.retired = made.ledger, made.retired
        self.steps += [e.step for e in self.entries if e.step and (not self.steps or self.steps[-1] != e.step)]
        return made

    async def run(self, claims=(), seconds: float = 30, die_after: str = "") -> None:
        """Until nothing is left to do. ``die_after``: a verb whose answer is lost, once."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            made = await self.look(claims)
            if not made.calls:
                return
            for call in made.calls:
                answer = await make_call(self.admin, call)
                if call.verb == die_after:
                    die_after = ""
                    continue
                self.entries = record(self.entries, call, answer, list(claims), datetime.now(UTC))
            await asyncio.sleep(0.05)
        raise AssertionError(f"still at {self.entries}")


needs_mooncake = pytest.mark.skipif(not available(), reason="mooncake_master is not installed")


@pytest.fixture(scope="module")
def mooncake() -> Iterator[RunningMooncake]:
    with running_mooncake() as running:
        yield running


def write(mooncake: RunningMooncake, tenant: str, count: int, size: int = 1 << 16) -> str:
    writer = Path(__file__).parent / "writer.py"
    command = [sys.executable, str(writer), mooncake.master, tenant, str(count), str(size)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return done.stdout.strip().splitlines()[-1]


@needs_mooncake
@pytest.mark.mooncake
@pytest.mark.parametrize("lost_answer", ["", "fence", "remove", "delete"])
async def test_a_real_store_proves_the_flush(mooncake: RunningMooncake, lost_answer: str) -> None:
    namespace = {"": "1", "fence": "2", "remove": "3", "delete": "4"}[lost_answer] * 64
    async with httpx.AsyncClient(trust_env=False) as http:
        ledger = Ledger(MooncakeAdmin(http, mooncake.http, 10))
        await ledger.run([Claim("chat", namespace)])
        tenant = ledger.entries[0].name
        assert write(mooncake, tenant, 20) == "0"
        await ledger.run([], die_after=lost_answer)
        entry = ledger.entries[0]
        assert entry.state == "Flushed" and entry.proof is not None
        assert entry.proof.bytes_before == 20 << 16
        assert entry.proof.bytes_before == entry.proof.bytes_evicted + entry.proof.bytes_removed
        assert entry.proof.delete_status == (404 if lost_answer == "delete" else 200)
        if lost_answer != "remove":
            assert entry.proof.objects_removed == 20 and entry.proof.bytes_removed == 20 << 16
        assert write(mooncake, tenant, 1) == "-1701"
        await ledger.run([Claim("chat", namespace)])
        assert ledger.entries[-1].name == tenant_name(namespace, 1)
        await ledger.run([])


@needs_mooncake
@pytest.mark.mooncake
async def test_unfinished_puts_of_a_killed_writer_are_a_step(mooncake: RunningMooncake) -> None:
    namespace = "5" * 64
    async with httpx.AsyncClient(trust_env=False) as http:
        ledger = Ledger(MooncakeAdmin(http, mooncake.http, 10))
        await ledger.run([Claim("chat", namespace)])
        tenant = ledger.entries[0].name
        writer = Path(__file__).parent / "writer.py"
        for _ in range(20):
            command = [sys.executable, str(writer), mooncake.master, tenant, "50", str(8 * MiB)]
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # noqa: ASYNC220
            deadline = time.monotonic() + 20
            while mooncake.charged(tenant) == 0 and time.monotonic() < deadline:
                pass
            process.kill()
            process.wait()
            mooncake.remove_all(tenant)
            if mooncake.charged(tenant):
                break
        else:
            pytest.skip("no writer was caught in the middle of a put")
        await ledger.run([], seconds=40)
        entry = ledger.entries[0]
        assert entry.state == "Flushed" and entry.proof is not None and entry.proof.delete_status == 200
        assert "WaitingForUnfinishedPuts" in ledger.steps
        assert entry.proof.bytes_before == entry.proof.bytes_evicted + entry.proof.bytes_removed
