"""Verification and pinning: what opens the gate, and what never does."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from moonpool_api import names
from moonpool_api.geometry import full_attention
from moonpool_api.inference_service import PinnedDigest
from moonpool_api.namespace import NamespaceInputs, RopeInputs, namespace_hash
from moonpool_operator.clients.worker import WorkerReport
from moonpool_operator.observe.model import Expectation, Pod, Revision
from moonpool_operator.plan.verify import verify

A, B = "sha256:" + "a" * 64, "sha256:" + "b" * 64
START = datetime(2026, 12, 1, tzinfo=UTC)
EXPECTED = Expectation(source="pvc/w", weight_version="v1", isolation="ns/chat", store="kv")


def inputs(**changes: object) -> NamespaceInputs:
    base = NamespaceInputs(
        architecture="llama",
        weights_digest=A,
        weight_version="v1",
        dtype="float32",
        attention_backend="torch",
        rope=RopeInputs(theta=1e4),
        geometry=full_attention(layers=2, kv_heads=1, head_dim=8, dtype="float32", prefix_granularity=16),
        isolation="ns/chat",
    )
    return base.model_copy(update=changes)


def report(**changes: object) -> WorkerReport:
    made = inputs(**changes)
    return WorkerReport(namespace=namespace_hash(made), inputs=made, weights_digest=made.weights_digest, boot="b")


def pod(name: str, revision: str = "r1", age: int = 0, verified: str = "") -> Pod:
    annotations = {names.ANNOTATION_VERIFIED_NAMESPACE: verified} if verified else {}
    return Pod(name, revision=revision, created=START + timedelta(seconds=age), annotations=annotations)


def check(reports: dict[str, WorkerReport], pods=None, pinned=(), expected=EXPECTED, pin=""):
    revision = Revision("chat-r1", "r1", 1, expected, pin)
    return verify([revision], pods or [pod(name) for name in reports], reports, list(pinned))


def pinned(digest: str) -> PinnedDigest:
    return PinnedDigest(source="pvc/w", weight_version="v1", digest=digest)


def test_the_first_report_is_taken_and_pinned() -> None:
    result = check({"p": report()})
    assert result.verdicts["p"].verified and result.revision_pins == {"r1": A}
    assert result.pins == (pinned(A),)


@pytest.mark.parametrize(
    ("field", "change", "expected"),
    [
        ("weight_version", {"weight_version": "v2"}, EXPECTED),
        ("isolation", {"isolation": "ns/other"}, EXPECTED),
        ("dtype", {"dtype": "bfloat16"}, replace(EXPECTED, dtype="float32")),
        ("attention_backend", {"attention_backend": "triton"}, replace(EXPECTED, attention_backend="torch")),
        ("quantization", {"quantization": "int8"}, EXPECTED),
        ("tensor_parallel", {"tensor_parallel": 2}, EXPECTED),
        ("prefix_granularity", {}, replace(EXPECTED, prefix_granularity=32)),
    ],
)
def test_an_input_that_differs_from_the_spec_is_named(field, change, expected) -> None:
    verdict = check({"p": report(**change)}, expected=expected).verdicts["p"]
    assert verdict.reason == "InputMismatch" and field in verdict.message


def test_auto_takes_what_the_worker_chose() -> None:
    assert check({"p": report(dtype="bfloat16", attention_backend="triton")}).verdicts["p"].verified


@pytest.mark.parametrize("where", ["status", "replica set"])
def test_other_weights_under_a_pinned_version_are_refused(where) -> None:
    arguments = {"pinned": [pinned(A)]} if where == "status" else {"pin": A}
    result = check({"p": report(weights_digest=B), "q": report(weights_digest=B)}, **arguments)
    for name in ("p", "q"):
        assert result.verdicts[name].reason == "WeightsDigestMismatch"
        assert A in result.verdicts[name].message and B in result.verdicts[name].message
    assert result.revision_pins == {"r1": A}


def test_naming_the_digest_in_the_spec_takes_new_weights_and_moves_the_pin() -> None:
    result = check({"p": report(weights_digest=B)}, pinned=[pinned(A)], expected=replace(EXPECTED, digest=B))
    assert result.verdicts["p"].verified and result.pins == (pinned(B),)


def test_a_named_digest_refuses_the_first_weights_too() -> None:
    result = check({"p": report()}, expected=replace(EXPECTED, digest=B))
    assert result.verdicts["p"].reason == "WeightsDigestMismatch" and "model.digest" in result.verdicts["p"].message
    assert result.pins == ()


def test_replicas_that_differ_from_each_other_are_refused() -> None:
    first, second = report(), report(attention_backend="triton")
    result = check({"p": first, "q": second}, pods=[pod("p", age=0), pod("q", age=5)])
    assert result.verdicts["p"].verified
    assert result.verdicts["q"].reason == "ReplicasDiffer" and "attention_backend" in result.verdicts["q"].message


def test_a_replica_that_was_verified_before_is_the_measure_not_the_oldest() -> None:
    first, second = report(), report(attention_backend="triton")
    pods = [pod("p", age=0), pod("q", age=5, verified=second.namespace)]
    result = check({"p": first, "q": second}, pods=pods)
    assert result.verdicts["q"].verified and result.verdicts["p"].reason == "ReplicasDiffer"


def test_a_namespace_that_is_not_the_hash_of_its_inputs_is_refused() -> None:
    verdict = check({"p": replace(report(), namespace="0" * 64)}).verdicts["p"]
    assert verdict.reason == "InconsistentReport"


def test_no_report_is_no_verdict() -> None:
    result = check({"p": WorkerReport(loading=True, problem="answers 503")})
    assert result.verdicts == {} and result.pins == ()


def test_two_revisions_of_one_version_share_the_pin() -> None:
    revisions = [Revision("chat-r1", "r1", 1, EXPECTED), Revision("chat-r2", "r2", 1, EXPECTED)]
    reports = {"p": report(), "q": report(weights_digest=B)}
    result = verify(revisions, [pod("p"), pod("q", "r2", 5)], reports, [])
    assert result.verdicts["q"].reason == "WeightsDigestMismatch"
