"""Which objects to reconcile after an event of some resource."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from moonpool_api import names

from moonpool_operator.queue import Key


class References:
    """Which services named which store, as last seen in events. A hint for waking only: nothing is decided by it."""

    def __init__(self) -> None:
        self._stores: dict[tuple[str, str], frozenset[str]] = {}
        self._services: dict[tuple[str, str], set[str]] = defaultdict(set)

    def note(self, namespace: str, service: str, stores: Iterable[str]) -> frozenset[str]:
        """Remember the stores of a service; returns those of before and now, all of which have to look."""
        before, now = self._stores.get((namespace, service), frozenset()), frozenset(stores)
        for store in before - now:
            self._services[(namespace, store)].discard(service)
        for store in now:
            self._services[(namespace, store)].add(service)
        if now:
            self._stores[(namespace, service)] = now
        else:
            self._stores.pop((namespace, service), None)
        return before | now

    def services_of(self, namespace: str, store: str) -> list[str]:
        return sorted(self._services.get((namespace, store), ()))

    def stores_of(self, namespace: str, service: str) -> frozenset[str]:
        return self._stores.get((namespace, service), frozenset())


def stores_named_by(service: Mapping[str, Any]) -> set[str]:
    """The store that the spec refers to, and those that claims are still held at."""
    l3 = (service.get("spec", {}).get("cache") or {}).get("l3") or {}
    claims = (service.get("status") or {}).get("kvNamespaces") or []
    named = {claim.get("store", "") for claim in claims} | {(l3.get("kvStoreRef") or {}).get("name", "")}
    return named - {""}


def after_service(references: References, kind: str | None, body: Mapping[str, Any]) -> list[Key]:
    namespace, name = body["metadata"]["namespace"], body["metadata"]["name"]
    stores = references.note(namespace, name, () if kind == "DELETED" else stores_named_by(body))
    return [
        Key(names.INFERENCE_SERVICE, namespace, name),
        *(Key(names.KV_STORE, namespace, store) for store in sorted(stores)),
    ]


def after_store(references: References, body: Mapping[str, Any]) -> list[Key]:
    namespace, name = body["metadata"]["namespace"], body["metadata"]["name"]
    services = references.services_of(namespace, name)
    return [
        Key(names.KV_STORE, namespace, name),
        *(Key(names.INFERENCE_SERVICE, namespace, service) for service in services),
    ]


def after_child(references: References, kind: str | None, body: Mapping[str, Any]) -> list[Key]:
    """The owner of a labelled child; a worker that is gone also frees the tenant that it was granted."""
    metadata = body["metadata"]
    namespace, labels = metadata["namespace"], metadata.get("labels") or {}
    keys = []
    if store := labels.get(names.LABEL_STORE):
        keys.append(Key(names.KV_STORE, namespace, store))
    if service := labels.get(names.LABEL_SERVICE):
        keys.append(Key(names.INFERENCE_SERVICE, namespace, service))
        if kind == "DELETED" and names.ANNOTATION_GRANTED_TENANT in (metadata.get("annotations") or {}):
            stores = sorted(references.stores_of(namespace, service))
            keys += [Key(names.KV_STORE, namespace, store) for store in stores]
    return keys
