"""A cluster in memory: just enough API server, kubelet, ReplicaSet controller, gateway and store to explore schedules.

The operator's own code runs on it unchanged, from observation to writes. Everything else happens only when the
explorer says so, in any order, and a write can be made the operator's last one.
"""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from moonpool_api import names
from moonpool_api.geometry import full_attention
from moonpool_api.namespace import NamespaceInputs, RopeInputs, namespace_hash
from moonpool_operator.clients.kube import ApiError, Object
from moonpool_operator.clients.mooncake import DeleteAnswer, MasterFigures, MasterUnavailable, TenantFigures
from moonpool_operator.clients.worker import WorkerReport
from moonpool_operator.observe.pods import ANNOTATION_EXPECTED, expectation_from_json

NS = "ns"


class Died(Exception):
    """The operator was killed right after a write."""


class Violation(AssertionError):
    """A promise was broken."""


@dataclass
class Fuse:
    """Lets so many writes through, then the operator dies."""

    left: int | None = None

    def burn(self) -> None:
        if self.left is not None:
            self.left -= 1
            if self.left <= 0:
                self.left = None
                raise Died


class MemoryKube:
    """The verbs of KubeClient on a dictionary. No validation; apply is a deep merge."""

    def __init__(self, fuse: Fuse) -> None:
        self.objects: dict[tuple[str, str], Object] = {}
        self.fuse, self.version = fuse, 0
        self.refuses = ""

    def _put(self, kind: str, obj: Object) -> Object:
        self.version += 1
        obj["metadata"]["resourceVersion"] = str(self.version)
        self.objects[(kind, obj["metadata"]["name"])] = obj
        return copy.deepcopy(obj)

    def add(self, obj: Object) -> Object:
        obj["metadata"].setdefault("uid", f"uid-{obj['metadata']['name']}-{self.version}")
        obj["metadata"].setdefault("generation", 1)
        return self._put(obj["kind"], obj)

    async def get(self, kind: str, namespace: str | None, name: str) -> Object | None:
        if kind == "Namespace":
            return {"metadata": {"name": name}}
        return copy.deepcopy(self.objects.get((kind, name)))

    async def list(self, kind: str, namespace: str | None, labels: dict[str, str] | None = None) -> list[Object]:
        found = [obj for (k, _), obj in sorted(self.objects.items()) if k == kind]
        wanted = (labels or {}).items()
        return [copy.deepcopy(o) for o in found if all(o["metadata"].get("labels", {}).get(k) == v for k, v in wanted)]

    async def apply(self, manifest: Object, subresource: str | None = None) -> Object:
        key = (manifest["kind"], manifest["metadata"]["name"])
        live = self.objects.get(key)
        if live is None:
            written = self.add(copy.deepcopy(manifest))
        else:
            version = manifest["metadata"].get("resourceVersion")
            if version and version != live["metadata"]["resourceVersion"]:
                raise ApiError(409, "Conflict", "changed")
            if subresource == "status":
                live["status"] = copy.deepcopy(manifest["status"])
            else:
                merge(live, copy.deepcopy(manifest))
            written = self._put(key[0], live)
        self.fuse.burn()
        return written

    async def refusal(self, manifest: Object) -> str:
        return self.refuses

    async def merge(self, kind: str, namespace: str, name: str, patch: Object) -> Object:
        live = self.objects.get((kind, name))
        if live is None:
            raise ApiError(404, "NotFound", name)
        merge(live, copy.deepcopy(patch))
        written = self._put(kind, live)
        self.fuse.burn()
        return written

    async def patch_pod_status(self, namespace: str, name: str, patch: Object) -> Object:
        live = self.objects.get(("Pod", name))
        if live is None:
            raise ApiError(404, "NotFound", name)
        set_condition(live, patch["status"]["conditions"][0])
        written = self._put("Pod", live)
        self.fuse.burn()
        return written

    async def create(self, manifest: Object) -> Object:
        return manifest

    async def delete(self, kind: str, namespace: str, name: str, uid: str | None = None) -> None:
        self.objects.pop((kind, name), None)
        self.fuse.burn()


def merge(live: Object, patch: Object) -> None:
    for key, value in patch.items():
        if isinstance(value, dict) and isinstance(live.get(key), dict):
            merge(live[key], value)
        else:
            live[key] = value


def set_condition(pod: Object, condition: Object) -> None:
    conditions = pod.setdefault("status", {}).setdefault("conditions", [])
    conditions[:] = [c for c in conditions if c["type"] != condition["type"]] + [condition]


@dataclass
class MemoryMaster:
    """Mooncake's admin API as measured; ``holders`` tells which existing pods were granted a tenant."""

    fuse: Fuse
    cluster: MemoryCluster
    up: bool = True
    tenants_: dict[str, list[int]] = field(default_factory=dict)  # name -> [quota, charged]

    def _check(self) -> None:
        if not self.up:
            raise MasterUnavailable("down")

    def _no_holder(self, verb: str, tenant: str) -> None:
        for pod in self.cluster.pods():
            if pod["metadata"].get("annotations", {}).get(names.ANNOTATION_GRANTED_TENANT) == tenant:
                raise Violation(f"{verb} of {tenant} while {pod['metadata']['name']} is granted it")

    async def figures(self) -> MasterFigures:
        self._check()
        return MasterFigures(1 << 20, sum(c for _, c in self.tenants_.values()), 0, 1)

    async def tenants(self) -> dict[str, TenantFigures]:
        self._check()
        return {name: TenantFigures(name, q, q, c) for name, (q, c) in self.tenants_.items()}

    async def set_quota(self, name: str, quota: int) -> TenantFigures:
        self._check()
        charged = self.tenants_.get(name, [0, 0])[1]
        self.tenants_[name] = [quota, charged]
        if sum(q for q, _ in self.tenants_.values()) > (1 << 20) + 8:
            raise Violation(f"quotas exceed the capacity: {self.tenants_}")
        self.fuse.burn()
        return TenantFigures(name, quota, quota, charged)

    async def fence(self, name: str) -> TenantFigures:
        self._no_holder("fence", name)
        return await self.set_quota(name, 1)

    async def remove_all(self, name: str) -> int:
        self._check()
        self._no_holder("removal", name)
        removed, self.tenants_[name][1] = self.tenants_[name][1] // 16, 0
        self.fuse.burn()
        return removed

    async def delete(self, name: str) -> DeleteAnswer:
        self._check()
        self._no_holder("deletion", name)
        if name not in self.tenants_:
            return DeleteAnswer(404, "OBJECT_NOT_FOUND")
        if self.tenants_[name][1]:
            return DeleteAnswer(409, "TENANT_NOT_EMPTY")
        del self.tenants_[name]
        self.cluster.deleted_tenants.append(name)
        self.fuse.burn()
        return DeleteAnswer(200, "ok")


class MemoryCluster:
    """Pods move only when told. Weights: what the volume holds for each weight version."""

    def __init__(self, seed: int, desired: int, surge: int, unavailable: int) -> None:
        self.random = random.Random(seed)
        self.fuse = Fuse()
        self.kube = MemoryKube(self.fuse)
        self.master = MemoryMaster(self.fuse, self)
        self.now = datetime(2026, 12, 1, tzinfo=UTC)
        self.desired, self.surge, self.unavailable = desired, surge, unavailable
        self.tenants: dict[str, str] = {}  # pod -> tenant that it has open
        self.listed: set[str] = set()
        self.deleted_tenants: list[str] = []
        self.deployed = False
        self._number = 0
        self._add_objects()

    def _add_objects(self) -> None:
        meta = {"namespace": NS}
        self.kube.add(
            {
                "apiVersion": names.API_VERSION,
                "kind": names.KV_STORE,
                "metadata": {"name": "kv", "finalizers": [names.FINALIZER], **meta},
                "spec": {},
            }
        )
        self.kube.add(
            {
                "apiVersion": names.API_VERSION,
                "kind": names.INFERENCE_SERVICE,
                "metadata": {"name": "chat", **meta},
                "spec": {
                    "model": {"source": {"persistentVolumeClaim": {"claimName": "w"}}},
                    "weightVersion": "A",
                    "replicas": self.desired,
                    "cache": {"l3": {"kvStoreRef": {"name": "kv"}}},
                    "rollout": {"maxSurge": self.surge, "maxUnavailable": self.unavailable, "bake": "20s"},
                },
            }
        )
        for name, role, label in (
            ("m", names.ROLE_MASTER, names.LABEL_STORE),
            ("g", names.ROLE_GATEWAY, names.LABEL_SERVICE),
        ):
            owner = "kv" if label == names.LABEL_STORE else "chat"
            self.kube.add(
                {
                    "apiVersion": "v1",
                    "kind": "Pod",
                    "metadata": {"name": name, "labels": {label: owner, names.LABEL_ROLE: role}, **meta},
                    "status": {"phase": "Running", "podIP": name, "conditions": [{"type": "Ready", "status": "True"}]},
                }
            )

    # -- what there is ----------------------------------------------------------------------------------------

    def pods(self) -> list[Object]:
        return [
            obj
            for (kind, _), obj in sorted(self.kube.objects.items())
            if kind == "Pod" and obj["metadata"]["labels"].get(names.LABEL_ROLE) == names.ROLE_WORKER
        ]

    def serving(self) -> list[Object]:
        return [
            p
            for p in self.pods()
            if p["metadata"]["name"] in self.listed and not p["metadata"].get("deletionTimestamp")
        ]

    @property
    def service(self) -> Object:
        return self.kube.objects[(names.INFERENCE_SERVICE, "chat")]

    @staticmethod
    def condition(pod: Object, kind: str) -> bool:
        return any(c["type"] == kind and c["status"] == "True" for c in pod.get("status", {}).get("conditions", []))

    def inputs(self, pod: Object) -> NamespaceInputs:
        expected = expectation_from_json(pod["metadata"]["annotations"][ANNOTATION_EXPECTED])
        return NamespaceInputs(
            architecture="llama",
            weights_digest="sha256:" + expected.weight_version.encode().hex().ljust(64, "0"),
            weight_version=expected.weight_version,
            dtype="float32",
            attention_backend="torch",
            rope=RopeInputs(theta=1e4),
            geometry=full_attention(layers=1, kv_heads=1, head_dim=8, dtype="float32", prefix_granularity=16),
            isolation=expected.isolation,
        )

    # -- the clients that the operator sees --------------------------------------------------------------------

    async def report(self, ip: str) -> WorkerReport:
        pod = self.kube.objects.get(("Pod", ip))
        if pod is None or not pod["status"].get("loaded"):
            return WorkerReport(loading=True, problem="loading")
        inputs, tenant = self.inputs(pod), self.tenants.get(ip, "")
        return WorkerReport(
            namespace=namespace_hash(inputs),
            inputs=inputs,
            weights_digest=inputs.weights_digest,
            l3_state="open" if tenant else "closed",
            l3_tenant=tenant,
        )

    async def grant(self, ip: str, namespace: str, tenant: str, master: str) -> str:
        if self.random.random() < 0.2:
            return "does not answer"
        self.tenants[ip] = tenant
        return ""

    async def healthy_workers(self, ip: str) -> frozenset[str] | None:
        return frozenset(self.listed)

    # -- what can happen ----------------------------------------------------------------------------------------

    def events(self) -> list:
        """One step of everything that may move on its own."""
        steps: list = [self.replica_sets, self.list_ready, self.write_kv, self.pass_time]
        for pod in self.pods():
            steps.append(lambda pod=pod: self.kubelet(pod))
        return steps

    def pass_time(self) -> None:
        self.now += timedelta(seconds=self.random.choice((1, 3, 10)))

    def replica_sets(self) -> None:
        """The ReplicaSet controller, of one set. It removes unready pods first and then the one that hurts most."""
        sets = [obj for (kind, _), obj in sorted(self.kube.objects.items()) if kind == "ReplicaSet"]
        revisions = {s["metadata"]["labels"][names.LABEL_REVISION] for s in sets}
        for pod in self.pods():
            if pod["metadata"]["labels"][names.LABEL_REVISION] not in revisions:
                self.terminate(pod)
        if not sets:
            return
        chosen = self.random.choice(sets)
        revision = chosen["metadata"]["labels"][names.LABEL_REVISION]
        own = [
            p
            for p in self.pods()
            if p["metadata"]["labels"][names.LABEL_REVISION] == revision and not p["metadata"].get("deletionTimestamp")
        ]
        surplus = len(own) - chosen["spec"]["replicas"]
        own.sort(key=lambda p: (self.condition(p, "Ready"), p["metadata"]["name"] not in self.listed))
        for pod in own[: max(0, surplus)]:
            self.terminate(pod)
        for _ in range(-surplus):
            self._number += 1
            template = chosen["spec"]["template"]["metadata"]
            self.kube.add(
                {
                    "apiVersion": "v1",
                    "kind": "Pod",
                    "metadata": {
                        "name": f"p{self._number:03d}",
                        "namespace": NS,
                        "creationTimestamp": text(self.now),
                        "labels": dict(template["labels"]),
                        "annotations": dict(template["annotations"]),
                    },
                    "status": {"phase": "Pending"},
                }
            )

    def terminate(self, pod: Object) -> None:
        if not pod["metadata"].get("deletionTimestamp"):
            pod["metadata"]["deletionTimestamp"] = text(self.now + timedelta(seconds=60))
            set_condition(pod, {"type": "Ready", "status": "False"})
            self.listed.discard(pod["metadata"]["name"])

    def kubelet(self, pod: Object) -> None:
        name, status = pod["metadata"]["name"], pod["status"]
        if ("Pod", name) not in self.kube.objects:
            return
        if pod["metadata"].get("deletionTimestamp"):
            self.tenants.pop(name, None)
            del self.kube.objects[("Pod", name)]
        elif not status.get("podIP"):
            status |= {"phase": "Running", "podIP": name}
        elif not status.get("loaded"):
            status["loaded"] = True
        else:
            verified = pod["metadata"]["annotations"].get(names.ANNOTATION_VERIFIED_NAMESPACE)
            inputs = namespace_hash(self.inputs(pod))
            ready = verified == inputs and self.condition(pod, names.READINESS_GATE)
            set_condition(pod, {"type": "Ready", "status": "True" if ready else "False"})

    def list_ready(self) -> None:
        """The gateway takes notice of one pod."""
        ready = [p["metadata"]["name"] for p in self.pods() if self.condition(p, "Ready")]
        if new := sorted(set(ready) - self.listed):
            self.listed.add(self.random.choice(new))

    def write_kv(self) -> None:
        """Workers put objects into the tenants that they have open; a fenced tenant refuses."""
        for tenant in self.tenants.values():
            entry = self.master.tenants_.get(tenant)
            if entry and entry[0] > 1:
                entry[1] = min(entry[0], entry[1] + 1024)

    # -- promises -----------------------------------------------------------------------------------------------

    def check(self) -> None:
        pods, serving = self.pods(), self.serving()
        self.deployed = self.deployed or len(serving) >= self.desired
        if len(pods) > self.desired + self.surge:
            raise Violation(f"{len(pods)} pods, at most {self.desired} + {self.surge} may be")
        if self.deployed and len(serving) < self.desired - self.unavailable:
            raise Violation(f"{len(serving)} workers serve, {self.desired} - {self.unavailable} have to")
        for pod in pods:
            tenant = self.tenants.get(pod["metadata"]["name"], "")
            if tenant and namespace_hash(self.inputs(pod)) not in tenant:
                raise Violation(f"{pod['metadata']['name']} has another namespace's tenant open")


def text(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")
