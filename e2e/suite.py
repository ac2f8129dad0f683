"""``make test``: every kind of check in turn, with the minutes that each took.

A kind that this machine cannot run (the end-to-end tests without root, say) is skipped with the reason, except in CI,
where it fails.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass

PYTHON = sys.executable
CI = bool(os.environ.get("CI"))


@dataclass(frozen=True)
class Kind:
    name: str
    command: list[str]


def kinds() -> list[Kind]:
    return [
        Kind("style", [PYTHON, "-m", "ruff", "check", "."]),
        Kind("format", [PYTHON, "-m", "ruff", "format", "--check", "."]),
        Kind("types", [PYTHON, "-m", "mypy"]),
        # The cluster first: tests of the contract ask the API server that it builds.
        Kind("cluster", [PYTHON, "-m", "e2e.cluster", "up"]),
        Kind("unit and component", [PYTHON, "-m", "pytest", "tests", "-q"]),
        Kind("images", [PYTHON, "-m", "images.builder", "build", "--load"]),
        Kind("end to end", [PYTHON, "-m", "pytest", "e2e", "-q", "-m", "not drill"]),
    ]


#: What cannot run when the cluster cannot be hosted here.
NEEDS_CLUSTER = {"images", "end to end"}
CANNOT_HOST = 3


def main() -> int:
    outcomes: list[tuple[str, float, str]] = []
    cannot_host = False
    for kind in kinds():
        if cannot_host and kind.name in NEEDS_CLUSTER:
            outcomes.append((kind.name, 0.0, "skipped: this machine cannot host the cluster"))
            continue
        print(f"\n=== {kind.name}: {' '.join(kind.command[1:])}", flush=True)
        begin = time.monotonic()
        code = subprocess.run(kind.command).returncode
        minutes = (time.monotonic() - begin) / 60
        if kind.name == "cluster" and code == CANNOT_HOST and not CI:
            cannot_host = True
            outcomes.append((kind.name, minutes, "skipped: see the sentence above"))
            continue
        outcomes.append((kind.name, minutes, "passed" if code == 0 else f"FAILED ({code})"))
        if code != 0 and kind.name == "cluster":
            break
    if not os.environ.get("MOONPOOL_KEEP_CLUSTER"):
        subprocess.run([PYTHON, "-m", "e2e.cluster", "down"])
    print("\nminutes  kind")
    for name, minutes, outcome in outcomes:
        print(f"{minutes:7.1f}  {name}: {outcome}")
    print(f"{sum(minutes for _, minutes, _ in outcomes):7.1f}  in all")
    failed = sum(outcome.startswith("FAILED") for _, _, outcome in outcomes)
    passed = sum(outcome == "passed" for _, _, outcome in outcomes)
    print(f"kinds: {passed} passed, {failed} failed, {len(outcomes) - passed - failed} skipped")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
