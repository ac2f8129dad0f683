"""Bad input is told where a user looks: the refusal of apply, the condition's message; nothing else breaks."""

from __future__ import annotations

import pytest
import yaml

from e2e.fleet import Fleet, KubectlError
from e2e.resources import inference_service


@pytest.mark.parametrize(
    ("edits", "message"),
    [
        ({"replikas": 2}, 'unknown field "spec.replikas"'),
        ({"cache.l1.size": "256 megabytes"}, "spec.cache.l1.size"),
    ],
)
def test_apply_refuses(fleet: Fleet, edits: dict, message: str) -> None:
    with pytest.raises(KubectlError, match=message):
        fleet.apply(inference_service(**edits))


def test_a_missing_model_file_is_named_in_the_condition(fleet: Fleet) -> None:
    edits = {"model.source.persistentVolumeClaim.path": "no-such-model.gguf", "replicas": 1, "cache.l3": None}
    fleet.apply(inference_service(**edits))

    def told() -> bool:
        return "no-such-model.gguf" in fleet.condition("WorkersReady").get("message", "")

    fleet.wait("the condition names the file", told, 180)
    print(fleet.condition("WorkersReady"))
    fleet.run("delete", "isvc", "chat", "--wait=true", "--timeout=90s")


def test_a_tier_that_does_not_fit_is_refused_with_the_arithmetic(fleet: Fleet) -> None:
    edits = {"cache.l2.size": "8Gi", "resources": {"limits": {"memory": "2Gi"}}, "replicas": 1, "cache.l3": None}
    fleet.apply(inference_service(**edits))

    def told() -> bool:
        return any("8.0 GiB" in c.get("message", "") for c in _conditions(fleet))

    fleet.wait("a condition shows the sum", told, 60)
    print(yaml.safe_dump(_conditions(fleet)))
    fleet.run("delete", "isvc", "chat", "--wait=true", "--timeout=90s")


def _conditions(fleet: Fleet) -> list[dict]:
    return (fleet.find("isvc", "chat") or {}).get("status", {}).get("conditions", [])
