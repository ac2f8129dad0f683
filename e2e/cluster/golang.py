"""Builds the cluster's Go programs from Go modules, once per version.

The modules under `go/` declare the programs as `tool` dependencies, so `go.sum` pins every byte that is built.
A finished folder carries a marker file with the digest of `go.mod` and `go.sum`; an interrupted build leaves only a
temporary folder, which the next build removes.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

from e2e.cluster import settings
from e2e.cluster.errors import ClusterError
from e2e.cluster.progress import Progress, Stage

MARKER = ".complete"
# From 1.21 on, Go fetches the toolchain that a module asks for (1.26 here) through the module proxy.
MIN_GO = (1, 21)


@dataclass(frozen=True)
class GoProgram:
    """A set of programs built from one module folder.

    `renames` maps what `go install` calls a program to what it's called here.
    """

    name: str
    module: Path
    target: Path
    programs: tuple[str, ...]
    ldflags: str = "-s -w"
    renames: dict[str, str] = field(default_factory=dict)
    expect: str = "some minutes"


def kubernetes(layout: settings.Layout) -> GoProgram:
    version = f"-X k8s.io/component-base/version.gitVersion=v{settings.KUBERNETES_VERSION}"
    return GoProgram(
        name=f"Kubernetes v{settings.KUBERNETES_VERSION}",
        module=settings.PACKAGE / "go" / "kubernetes",
        target=layout.kubernetes_bin,
        programs=(
            "etcd",
            "kube-apiserver",
            "kube-controller-manager",
            "kube-proxy",
            "kube-scheduler",
            "kubectl",
            "kubelet",
        ),
        ldflags=f"-s -w {version}",
        renames={"server": "etcd"},
        expect="6 to 9 minutes on 2 cores, once",
    )


def coredns(layout: settings.Layout) -> GoProgram:
    return GoProgram(
        name=f"CoreDNS v{settings.COREDNS_VERSION}",
        module=settings.PACKAGE / "go" / "coredns",
        target=layout.coredns_bin,
        programs=("coredns",),
        expect="2 to 4 minutes on 2 cores, once",
    )


def kube_router(layout: settings.Layout) -> GoProgram:
    return GoProgram(
        name=f"kube-router v{settings.KUBE_ROUTER_VERSION}",
        module=settings.PACKAGE / "go" / "netpol",
        target=layout.kube_router_bin,
        programs=("kube-router",),
        expect="2 minutes on 2 cores, once",
    )


def module_digest(module: Path) -> str:
    """SHA-256 over `go.mod` and `go.sum`: the identity of what would be built."""
    digest = hashlib.sha256()
    for name in ("go.mod", "go.sum"):
        digest.update(name.encode() + b"\0" + (module / name).read_bytes())
    return digest.hexdigest()


def is_complete(program: GoProgram) -> bool:
    """Whether the cached folder is a finished build of exactly this module."""
    marker = program.target / MARKER
    try:
        recorded = json.loads(marker.read_text())
    except (OSError, ValueError):
        return False
    present = all(os.access(program.target / name, os.X_OK) for name in program.programs)
    return present and recorded.get("module") == module_digest(program.module)


def parse_go_version(text: str) -> tuple[int, int]:
    """`go version go1.26.1 linux/amd64` → (1, 26); (0, 0) when it isn't Go's answer."""
    found = re.search(r"\bgo(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def find_go() -> Path | None:
    """A Go that can build the modules: new enough, or (since 1.21) able to fetch a newer toolchain by itself."""
    ours = settings.cache_root() / "go" / "go" / "bin" / "go"
    for candidate in (shutil.which("go"), "/usr/local/go/bin/go", str(ours)):
        if candidate and os.access(candidate, os.X_OK):
            answer = subprocess.run(
                [candidate, "version"], capture_output=True, text=True, env={**os.environ, "GOTOOLCHAIN": "local"}
            ).stdout
            if parse_go_version(answer) >= MIN_GO:
                return Path(candidate)
    return None


def ensure_built(program: GoProgram, go: Path, progress: Progress) -> bool:
    """Build the programs unless they are cached. Returns whether anything was built.

    Raises ClusterError with the end of Go's output when the build fails.
    """
    if is_complete(program):
        return False
    with progress.stage(f"building {program.name} ({program.expect})") as stage:
        build(program, go, stage)
    return True


def build(program: GoProgram, go: Path, stage: Stage) -> None:
    """Build into a temporary folder and rename it, so that a folder that exists is a folder that is whole."""
    program.target.parent.mkdir(parents=True, exist_ok=True)
    scratch = program.target.with_name(f".{program.target.name}.building")
    shutil.rmtree(scratch, ignore_errors=True)
    (scratch / "module").mkdir(parents=True)
    for name in ("go.mod", "go.sum"):
        shutil.copy(program.module / name, scratch / "module" / name)
    log = program.target.with_name(f"{program.target.name}.log")
    env = {
        **os.environ,
        "GOBIN": str(scratch / "bin"),
        "CGO_ENABLED": "0",
        "GOTOOLCHAIN": "auto",
        "GOFLAGS": "-mod=readonly -buildvcs=false",
    }
    with log.open("w") as out:
        command = ["nice", "-n", "5", str(go), "install", "-v", "-trimpath", "-ldflags", program.ldflags, "tool"]
        process = subprocess.Popen(command, cwd=scratch / "module", env=env, stdout=out, stderr=subprocess.STDOUT)
        try:
            _follow(process, log, stage)
        except BaseException:
            process.terminate()
            process.wait()
            raise
    if process.returncode:
        raise ClusterError(f"building {program.name} failed, see {log}:\n{_tail(log)}")
    finish(program, scratch / "bin")
    shutil.rmtree(scratch, ignore_errors=True)


def finish(program: GoProgram, built: Path) -> None:
    """Rename what needs it, write the marker, and put the folder in its place."""
    for old, new in program.renames.items():
        if (built / old).exists():
            (built / old).rename(built / new)
    missing = [name for name in program.programs if not (built / name).exists()]
    if missing:
        raise ClusterError(f"the build of {program.name} made no {', '.join(missing)}")
    (built / MARKER).write_text(json.dumps({"name": program.name, "module": module_digest(program.module)}) + "\n")
    if built != program.target:
        shutil.rmtree(program.target, ignore_errors=True)
        built.rename(program.target)


def _follow(process: subprocess.Popen, log: Path, stage: Stage) -> None:
    """Wait for the build, naming the package that is being compiled."""
    while process.poll() is None:
        time.sleep(0.5)
        last = _tail(log, 1).strip()
        stage.note(last or "fetching modules")


def _tail(log: Path, lines: int = 15) -> str:
    with log.open("rb") as handle:
        handle.seek(0, os.SEEK_END)
        handle.seek(max(0, handle.tell() - 8192))
        return "\n".join(handle.read().decode(errors="replace").splitlines()[-lines:])
