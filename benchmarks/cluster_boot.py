"""Warm start of the embedded cluster: binaries and images cached, everything else from nothing.

    uv run python -m benchmarks.cluster_boot

``node_ready_s``: from ``up`` to a Ready node. ``demo_ready_s``: from ``up`` until the demo's two resources are Ready,
the model loaded, verified and granted its tenant. A cluster that is up is taken down first.
"""

from __future__ import annotations

import time

from moonpool_worker.weights.resolve import packaged_smollm2

from benchmarks.harness.report import Report, say
from e2e.cluster import ensure_cluster
from e2e.cluster.lifecycle import down
from e2e.demo.__main__ import FOLDER
from e2e.fleet import Fleet, install_operator
from images.builder import build_and_load


def main() -> None:
    report = Report("cluster_boot")
    say("filling the caches")
    build_and_load(ensure_cluster())
    down()
    say("starting")
    begin = time.perf_counter()
    cluster = ensure_cluster()
    report.add(node_ready_s=time.perf_counter() - begin)
    build_and_load(cluster)
    fleet = Fleet(cluster, "cluster-boot")
    install_operator(cluster)
    fleet.create_namespace()
    fleet.create_weights_volume(packaged_smollm2())
    fleet.run("apply", "-f", str(FOLDER / "kvstore.yaml"), "-f", str(FOLDER / "inferenceservice.yaml"))
    fleet.wait_condition("Ready", timeout=300)
    fleet.wait_condition("CacheReady", timeout=120)
    report.add(demo_ready_s=time.perf_counter() - begin)
    fleet.delete_namespace()
    down()
    print(report.line())


if __name__ == "__main__":
    main()
