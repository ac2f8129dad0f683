"""Is what a worker loaded what was asked for? The rule that nothing but verification opens the readiness gate.

A worker reports every input of its KV namespace. The operator compares the inputs with the revision's expectation,
the weights digest with the pinned one, and the replicas of a revision with each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from moonpool_api import names
from moonpool_api.inference_service import PinnedDigest
from moonpool_api.namespace import NamespaceInputs, differing_inputs, namespace_hash

from moonpool_operator.clients.worker import WorkerReport
from moonpool_operator.observe.model import Expectation, Pod, Revision

#: Pins that are kept; a pin that falls out means only that its weights would be taken on trust once more.
MAX_PINS = 64


@dataclass(frozen=True)
class Verdict:
    """``namespace`` is set when verified; ``reason`` and ``message`` when refused; neither while pending."""

    pod: str
    namespace: str = ""
    digest: str = ""
    reason: str = ""
    message: str = ""

    @property
    def verified(self) -> bool:
        return bool(self.namespace)

    @property
    def refused(self) -> bool:
        return bool(self.reason)


@dataclass(frozen=True)
class Verification:
    """``verdicts`` by pod name; ``pins`` is the new status.pinned; ``revision_pins`` the digest of each revision."""

    verdicts: Mapping[str, Verdict]
    pins: tuple[PinnedDigest, ...]
    revision_pins: Mapping[str, str]


def verify(
    revisions: Iterable[Revision],
    pods: Sequence[Pod],
    reports: Mapping[str, WorkerReport],
    pinned: Sequence[PinnedDigest],
) -> Verification:
    """Judge every worker that has reported. Pods of the oldest revision, then the oldest pods, pin first."""
    pins = {(pin.source, pin.weight_version): pin.digest for pin in pinned}
    verdicts: dict[str, Verdict] = {}
    revision_pins: dict[str, str] = {}
    for revision in revisions:
        own = sorted(
            (pod for pod in pods if pod.revision == revision.revision), key=lambda pod: (str(pod.created), pod.name)
        )
        key = (revision.expectation.source, revision.expectation.weight_version)
        # A digest named by the spec wins over a pin: naming it is how new weights get under an old version.
        digest = revision.expectation.digest or revision.pinned_digest or pins.get(key, "")
        agreed: tuple[str, NamespaceInputs] | None = _agreed(own, reports)
        for pod in own:
            report = reports.get(pod.name)
            if report is None or report.loading:
                continue
            verdict = judge(pod, report, revision.expectation, digest, agreed)
            verdicts[pod.name] = verdict
            if verdict.verified and report.inputs is not None:
                digest = digest or verdict.digest
                agreed = agreed or (pod.name, report.inputs)
        if digest:
            revision_pins[revision.revision] = digest
            if any(verdicts[pod.name].verified for pod in own if pod.name in verdicts):
                pins.pop(key, None)
                pins[key] = digest
    kept = list(pins.items())[-MAX_PINS:]
    return Verification(
        verdicts,
        tuple(PinnedDigest(source=s, weight_version=v, digest=d) for (s, v), d in kept),
        revision_pins,
    )


def _agreed(own: Sequence[Pod], reports: Mapping[str, WorkerReport]) -> tuple[str, NamespaceInputs] | None:
    """The inputs of a replica that was verified before: the others have to be like it."""
    for pod in own:
        report = reports.get(pod.name)
        annotated = pod.annotations.get(names.ANNOTATION_VERIFIED_NAMESPACE)
        if report and report.inputs and annotated and annotated == report.namespace and not pod.terminating:
            return pod.name, report.inputs
    return None


def judge(
    pod: Pod,
    report: WorkerReport,
    expected: Expectation,
    digest: str,
    agreed: tuple[str, NamespaceInputs] | None,
) -> Verdict:
    """One worker's report against all that is known; the first difference is the reason."""
    inputs = report.inputs
    if report.problem or inputs is None:
        return _refuse(pod, "UnreadableReport", report.problem or "the report has no inputs")
    if report.namespace != namespace_hash(inputs) or report.weights_digest != inputs.weights_digest:
        return _refuse(pod, "InconsistentReport", "the reported namespace is not the hash of the reported inputs")
    for field, wanted, got in _asked(expected, inputs):
        if wanted != got:
            return _refuse(pod, "InputMismatch", f"{field} is {got!r}, the spec asks for {wanted!r}")
    if digest and digest != inputs.weights_digest:
        source = "model.digest" if expected.digest else "the digest pinned"
        return _refuse(
            pod,
            "WeightsDigestMismatch",
            f"weights_digest is {inputs.weights_digest}, but {source} for weightVersion "
            f"{expected.weight_version!r} is {digest}; new weights need a new weightVersion",
        )
    if agreed is not None:
        for field, (left, right) in differing_inputs(agreed[1], inputs).items():
            return _refuse(pod, "ReplicasDiffer", f"{field} is {right!r}, but {left!r} on {agreed[0]}")
    return Verdict(pod.name, namespace=report.namespace, digest=inputs.weights_digest)


def _asked(expected: Expectation, inputs: NamespaceInputs) -> Iterable[tuple[str, object, object]]:
    """(name, wanted, got) of each input that the spec determines."""
    yield "weight_version", expected.weight_version, inputs.weight_version
    yield "isolation", expected.isolation, inputs.isolation
    yield "prefix_granularity", expected.prefix_granularity, inputs.geometry.prefix_granularity
    yield "quantization", expected.quantization, inputs.quantization
    yield "tensor_parallel", expected.tensor_parallel, inputs.tensor_parallel
    if expected.dtype != "auto":
        yield "dtype", expected.dtype, inputs.dtype
    if expected.attention_backend != "auto":
        yield "attention_backend", expected.attention_backend, inputs.attention_backend


def _refuse(pod: Pod, reason: str, message: str) -> Verdict:
    return Verdict(pod.name, reason=reason, message=f"{pod.name}: {message}")
