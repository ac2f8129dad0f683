"""A real Kubernetes on one Linux machine, without Docker or a VM.

`python -m e2e.cluster up` starts it; `ensure_cluster()` does the same from Python and returns a `Cluster`.
"""

from e2e.cluster.cluster import Cluster
from e2e.cluster.errors import CannotHostError, ClusterError
from e2e.cluster.lifecycle import down, up

ensure_cluster = up

__all__ = ["CannotHostError", "Cluster", "ClusterError", "down", "ensure_cluster", "up"]
