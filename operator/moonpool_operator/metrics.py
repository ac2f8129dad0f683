"""Prometheus metrics of the operator itself."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

_RECONCILE_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_STEP_BUCKETS = (0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)

RECONCILE_SECONDS = Histogram(
    "moonpool_operator_reconcile_seconds", "Duration of one reconcile", ["kind"], buckets=_RECONCILE_BUCKETS
)
RECONCILE_ERRORS = Counter("moonpool_operator_reconcile_errors_total", "Reconciles that failed", ["kind", "error"])
API_WRITES = Gauge("moonpool_operator_api_writes", "Writes sent to the API server since the start")
ROLLOUT_STEP_SECONDS = Histogram(
    "moonpool_operator_rollout_step_seconds", "Time that a rollout spent in a step", ["step"], buckets=_STEP_BUCKETS
)
FLUSH_SECONDS = Histogram(
    "moonpool_operator_flush_seconds", "From the fence of a tenant to its deletion", buckets=_STEP_BUCKETS
)
FLUSH_BYTES = Counter("moonpool_operator_flush_bytes_total", "Bytes that fenced tenants held before their fence")
FLUSH_OBJECTS = Counter("moonpool_operator_flush_objects_total", "Objects that were removed from fenced tenants")
TENANTS_LOST = Counter("moonpool_operator_tenants_lost_total", "Tenants that vanished without a proof")
