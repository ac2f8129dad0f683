"""Sharing the store's memory: never more than is mounted, and the new tenant grows as the old one is done."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from moonpool_operator.plan.quotas import Share, share_out

GiB = 1 << 30


def test_one_tenant_gets_everything() -> None:
    assert share_out(GiB, [Share("a", None, False, 0)]) == {"a": GiB}


def test_equal_shares_and_a_stated_wish() -> None:
    shares = [Share("a", None, False, 0), Share("b", None, False, 0), Share("c", GiB // 4, False, 0)]
    quotas = share_out(GiB, shares)
    assert quotas["c"] == GiB // 4 and quotas["a"] == quotas["b"] == GiB * 3 // 8


def test_a_draining_tenant_keeps_what_it_uses_and_the_new_one_gets_the_rest() -> None:
    quotas = share_out(GiB, [Share("old", None, True, GiB // 4), Share("new", None, False, 0)])
    assert quotas["old"] == GiB // 4 and quotas["new"] == GiB * 3 // 4


def test_a_full_old_tenant_leaves_a_quarter() -> None:
    quotas = share_out(GiB, [Share("old", None, True, GiB), Share("new", None, False, 0)])
    assert quotas["new"] >= GiB // 4


def test_what_fenced_tenants_hold_is_not_given_away() -> None:
    assert share_out(GiB, [Share("new", None, False, 0)], reserved=GiB // 2)["new"] == GiB // 2


def test_small_changes_of_use_change_no_quota() -> None:
    def quotas(charged: int) -> dict[str, int]:
        return share_out(GiB, [Share("old", None, True, charged), Share("new", None, False, 0)])

    assert quotas(100 << 20) == quotas((100 << 20) + 4096)


def test_nothing_is_mounted() -> None:
    assert share_out(0, [Share("a", None, False, 0)]) == {}


@given(
    st.integers(1 << 20, 1 << 40),
    st.lists(
        st.tuples(st.one_of(st.none(), st.integers(1, 1 << 40)), st.booleans(), st.integers(0, 1 << 40)), max_size=6
    ),
    st.integers(0, 1 << 39),
)
def test_the_sum_is_within_the_capacity(capacity, wishes, reserved) -> None:
    shares = [Share(str(i), wanted, draining, charged) for i, (wanted, draining, charged) in enumerate(wishes)]
    reserved = min(reserved, capacity // 2)
    quotas = share_out(capacity, shares, reserved)
    assert sum(quotas.values()) + reserved <= capacity + len(shares)
    assert all(quota >= 1 for quota in quotas.values())
    assert quotas.keys() == {share.tenant for share in shares}
