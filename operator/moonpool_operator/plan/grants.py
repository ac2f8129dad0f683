"""What the operator writes on worker pods: the gate, the verified namespace, and the granted tenant."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moonpool_api import names
from moonpool_api.inference_service import KVNamespaceStatus

from moonpool_operator.observe.model import Pod, Revision, ServiceObservation, StoreView
from moonpool_operator.plan.claims import WANTED, registered_tenant
from moonpool_operator.plan.verify import Verdict


@dataclass(frozen=True)
class PodOrder:
    """What is to be written on one pod; None leaves a thing as it is.

    ``nudge`` asks the worker to read its annotations now: the kubelet may take seconds to hand them on.
    """

    pod: str
    uid: str
    ip: str
    annotations: Mapping[str, str] | None = None
    gate: bool | None = None
    reason: str = ""
    message: str = ""
    nudge: bool = False
    namespace: str = ""
    tenant: str = ""
    master: str = ""

    @property
    def empty(self) -> bool:
        return self.annotations is None and self.gate is None and not self.nudge


def order_pods(
    seen: ServiceObservation, pods: Sequence[Pod], verdicts: Mapping[str, Verdict], claims: Sequence[KVNamespaceStatus]
) -> list[PodOrder]:
    revisions = {revision.revision: revision for revision in seen.revisions}
    orders = []
    for pod in pods:
        verdict, revision = verdicts.get(pod.name), revisions.get(pod.revision)
        if verdict is None or revision is None:
            continue
        order = _refusal(pod, verdict) if verdict.refused else _approval(pod, verdict, revision, seen, claims)
        if not order.empty:
            orders.append(order)
    return orders


def _refusal(pod: Pod, verdict: Verdict) -> PodOrder:
    gate = None if pod.gate is False else False
    return PodOrder(pod.name, pod.uid, pod.ip, gate=gate, reason=verdict.reason, message=verdict.message)


def _approval(
    pod: Pod, verdict: Verdict, revision: Revision, seen: ServiceObservation, claims: Sequence[KVNamespaceStatus]
) -> PodOrder:
    tenant, master = granted(verdict.namespace, revision.expectation.store, seen.stores, claims)
    wanted = {names.ANNOTATION_VERIFIED_NAMESPACE: verdict.namespace}
    if tenant or pod.annotations.get(names.ANNOTATION_GRANTED_TENANT):
        wanted |= {names.ANNOTATION_GRANTED_TENANT: tenant, names.ANNOTATION_GRANTED_MASTER: master}
    changed = any(pod.annotations.get(key, "") != value for key, value in wanted.items())
    report = seen.reports.get(pod.name)
    behind = report is not None and report.l3_tenant != tenant
    return PodOrder(
        pod.name,
        pod.uid,
        pod.ip,
        annotations=wanted if changed else None,
        gate=None if pod.gate is True else True,
        reason="Verified",
        message=f"KV namespace {verdict.namespace}",
        nudge=changed or behind or not pod.ready,
        namespace=verdict.namespace,
        tenant=tenant,
        master=master,
    )


def granted(
    namespace: str, store: str, stores: Mapping[str, StoreView], claims: Sequence[KVNamespaceStatus]
) -> tuple[str, str]:
    """(tenant, master address) that a pod of ``namespace`` may open, or two empty strings."""
    claimed = any(c.hash == namespace and c.store == store and c.state in WANTED for c in claims)
    tenant = registered_tenant(namespace, store, stores) if store and claimed else ""
    return (tenant, stores[store].status.master) if tenant else ("", "")
