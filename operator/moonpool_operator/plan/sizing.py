"""Will the cache tiers fit into the pod? Arithmetic only; bytes."""

from __future__ import annotations

from dataclasses import dataclass

from moonpool_api.inference_service import Cache, Resources
from moonpool_api.quantity import format_bytes, parse_bytes

MiB, GiB = 1 << 20, 1 << 30

#: Weights, activations and the interpreter, when the size of the weights isn't known (torch alone: 0.7 GiB).
UNKNOWN_WEIGHTS = GiB
#: Beside weights of known size: interpreter, torch and activations.
RUNTIME = 768 * MiB
DEFAULT_L2_RATIO = 1.0


@dataclass(frozen=True)
class Sizes:
    l1: int
    l2: int
    #: What the pod needs in all.
    memory: int


class DoesNotFit(ValueError):
    """The tiers and the weights are larger than the pod's memory limit; the message shows the sum."""


def size_tiers(cache: Cache, resources: Resources, weights_bytes: int | None = None) -> Sizes:
    """Bytes of L1 and L2 and of the whole pod. Raises DoesNotFit against the pod's memory limit.

    On a CPU the first tier is host memory too, so it counts.
    """
    l1 = parse_bytes(cache.l1.size)
    if cache.l2.disabled:
        l2 = 0
    elif cache.l2.size is not None:
        l2 = parse_bytes(cache.l2.size)
    else:
        l2 = int(l1 * (cache.l2.ratio or DEFAULT_L2_RATIO))
    base = UNKNOWN_WEIGHTS if weights_bytes is None else weights_bytes + RUNTIME
    need = l1 + l2 + base
    limit = parse_bytes(resources.limits.memory) if resources.limits.memory else None
    if limit is not None and need > limit:
        raise DoesNotFit(
            f"L1 {format_bytes(l1)} + L2 {format_bytes(l2)} + weights and runtime {format_bytes(base)} = "
            f"{format_bytes(need)} do not fit into resources.limits.memory {format_bytes(limit)}; "
            "raise the limit or lower cache.l1.size or cache.l2"
        )
    return Sizes(l1, l2, need)


def mebibytes(count: int) -> str:
    """``count`` bytes as a Kubernetes quantity in whole Mi, rounded up."""
    return f"{-(-count // MiB)}Mi"
