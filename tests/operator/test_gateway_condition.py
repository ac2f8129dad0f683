"""GatewayReady is about routes, not about processes."""

from __future__ import annotations

import pytest
from moonpool_api.inference_service import InferenceServiceSpec, InferenceServiceStatus
from moonpool_operator.observe.model import GatewayView, Pod, ServiceObservation
from moonpool_operator.plan.service_conditions import gateway_ready


def seen(workers: frozenset[str] | None, replicas: int = 1) -> ServiceObservation:
    spec = {
        "model": {"source": {"image": {"reference": "a.b/c:1"}}},
        "weightVersion": "v1",
        "replicas": replicas,
    }
    return ServiceObservation(
        namespace="default",
        name="chat",
        uid="u",
        generation=1,
        spec=InferenceServiceSpec.model_validate(spec),
        status=InferenceServiceStatus(),
        gateways=(Pod("chat-gateway-1", ready=True),),
        views=(GatewayView("chat-gateway-1", workers),),
    )


@pytest.mark.parametrize(
    ("workers", "replicas", "status", "reason"),
    [
        (frozenset({"10.0.0.1"}), 1, "True", "AllReady"),
        (frozenset(), 1, "False", "NoWorkers"),
        (None, 1, "False", "NotAnswering"),
        (frozenset(), 0, "True", "AllReady"),
    ],
)
def test_a_gateway_is_ready_when_it_routes(
    workers: frozenset[str] | None, replicas: int, status: str, reason: str
) -> None:
    condition = gateway_ready(seen(workers, replicas))
    assert (condition.status, condition.reason) == (status, reason)
