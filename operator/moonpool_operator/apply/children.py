"""Desired children onto the API server, by server-side apply, and only where they differ."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping

from moonpool_api import names

from moonpool_operator.clients.kube import KubeClient, Object

#: Digest of the manifest that was applied last. It tells a removed field, which a comparison of values can't see.
ANNOTATION_APPLIED = f"{names.GROUP}/applied"


async def apply_children(
    kube: KubeClient, desired: Iterable[Object], live: Mapping[tuple[str, str], Object]
) -> list[Object]:
    """Apply each child that is missing or differs; returns what was applied."""
    applied = []
    for manifest in desired:
        stamped = stamp(manifest)
        present = live.get((manifest["kind"], manifest["metadata"]["name"]))
        if present is None or not is_applied(stamped, present):
            await kube.apply(stamped)
            applied.append(stamped)
    return applied


def stamp(manifest: Object) -> Object:
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    metadata = manifest["metadata"]
    annotations = {**metadata.get("annotations", {}), ANNOTATION_APPLIED: digest}
    return {**manifest, "metadata": {**metadata, "annotations": annotations}}


def is_applied(stamped: Object, live: Object) -> bool:
    """Was this very manifest applied, and has nobody changed a field of it since?"""
    return contains(live, stamped)


def contains(live: object, desired: object) -> bool:
    """Is every field of ``desired`` in ``live``? Lists are compared item by item, in order."""
    if isinstance(desired, dict):
        return isinstance(live, dict) and all(contains(live.get(key), value) for key, value in desired.items())
    if isinstance(desired, list):
        if not isinstance(live, list) or len(live) != len(desired):
            # The API server drops empty lists.
            return not desired and live is None
        return all(contains(left, right) for left, right in zip(live, desired, strict=True))
    # The API server leaves out zero values of optional fields.
    return live == desired or (live is None and desired in ("", False)) or (desired == {} and live is None)
