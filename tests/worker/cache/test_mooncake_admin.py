"""The facts of docs/mooncake-admin.md, asked of a real master: Moonpool's operator relies on them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.mooncake_fixture import MiB, RunningMooncake, available, running_mooncake

pytestmark = [pytest.mark.mooncake, pytest.mark.skipif(not available(), reason="Mooncake is not installed")]

QUOTAS = "/api/v1/tenant_quotas"


@pytest.fixture(scope="module")
def mooncake() -> Iterator[RunningMooncake]:
    with running_mooncake(store=False) as running:
        yield running


def test_register_read_change_delete(mooncake: RunningMooncake) -> None:
    assert mooncake.quota("t") is None
    answer = mooncake.register("t", 5 * MiB)
    assert answer.status == 200
    assert answer.body["data"] == {
        "tenant_id": "t",
        "requested_quota_bytes": 5 * MiB,
        "effective_quota_bytes": 0,  # no segment is mounted
        "charged_bytes": 0,
        "admission_closed": False,
        "over_quota": False,
        "has_explicit_policy": True,
    }
    assert mooncake.register("t", 6 * MiB).body["data"]["requested_quota_bytes"] == 6 * MiB
    assert [one["tenant_id"] for one in mooncake.call("GET", QUOTAS).body["data"]] == ["t"]
    gone = mooncake.delete("t")
    assert (gone.status, gone.body) == (200, {"success": True, "data": None})
    again = mooncake.delete("t")
    assert (again.status, again.body["error_code"]) == (404, -704)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (f"{QUOTAS}?tenant_id=x", {"requested_quota_bytes": 0}),
        (f"{QUOTAS}?tenant_id=x", {"quota": 1}),
        (f"{QUOTAS}?tenant_id=x", None),
        (QUOTAS, {"tenant_id": "x", "requested_quota_bytes": 1}),
    ],
)
def test_other_forms_are_refused(mooncake: RunningMooncake, path: str, body: dict | None) -> None:
    answer = mooncake.call("PUT", path, body)
    assert (answer.status, answer.body["error_code"]) == (400, -600)
    assert mooncake.quota("x") is None


def test_emptying_an_unknown_tenant_is_a_success_that_proves_nothing(mooncake: RunningMooncake) -> None:
    assert mooncake.call("POST", "/api/v1/remove_all?force=true&tenant_id=nobody").body == {
        "success": True,
        "removed_count": 0,
    }


def test_tenants_survive_the_master(mooncake: RunningMooncake) -> None:
    assert mooncake.register("kept", MiB).status == 200
    mooncake.kill("master")
    mooncake.start_master()
    kept = mooncake.quota("kept")
    assert kept is not None
    assert kept["requested_quota_bytes"] == MiB
