"""Answers that are not what the other side promises: they count as no answer, and never end a reconcile."""

from __future__ import annotations

import httpx
import pytest
from moonpool_operator.apply.status import tell
from moonpool_operator.clients.gateway import GatewayClient
from moonpool_operator.clients.mooncake import MasterUnavailable, MooncakeAdmin
from moonpool_operator.plan.story import Story


def answering(text: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.MockTransport(lambda _: httpx.Response(200, text=text)))


@pytest.mark.parametrize("text", ["", "[]", "null", '{"workers": null}', '{"workers": ["x"]}'])
async def test_a_gateway_that_talks_nonsense_does_not_answer(text: str) -> None:
    assert await GatewayClient(answering(text), 1).healthy_workers("10.0.0.1") is None


@pytest.mark.parametrize("text", ["", "[]", "null", '{"removed_count": null}', '{"removed_count": "many"}'])
async def test_a_master_that_talks_nonsense_is_unavailable(text: str) -> None:
    with pytest.raises(MasterUnavailable):
        await MooncakeAdmin(answering(text), "http://master", 1).remove_all("mp1-x-0")


class SilentKube:
    async def create(self, manifest: dict) -> dict:
        raise httpx.ReadTimeout("no answer")


async def test_an_event_that_times_out_does_not_end_the_reconcile() -> None:
    await tell(SilentKube(), "KVStore", "default", "kv", "u", [Story("Ready", "x")])  # type: ignore[arg-type]
