"""The base layer: Debian bookworm with Python 3.11 and the shared libraries that the wheels don't bundle."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from images.builder.errors import BuildError

SUITE = "bookworm"
PACKAGES = (
    "python3",
    "ca-certificates",
    "libcurl4",
    "libgomp1",
    "libibverbs1",
    "libnuma1",
    "libssl3",
    "libstdc++6",
    "zlib1g",
)
UID = 65532
DROPPED_PATHS = (
    "/usr/share/doc/*",
    "/usr/share/man/*",
    "/usr/share/info/*",
    "/usr/share/locale/*",
    "/usr/share/lintian/*",
    "/usr/share/bug/*",
    "/usr/lib/x86_64-linux-gnu/gconv/*",
    "/usr/lib/x86_64-linux-gnu/perl-base/*",
    "/usr/lib/python3.11/test/*",
    "/usr/lib/python3.11/idlelib/*",
    "/usr/lib/python3.11/lib2to3/*",
)
# Needed while the packages are configured, so they go at the end, not by path-exclude.
LATE = tuple(path for path in DROPPED_PATHS if path.startswith("/usr/lib/"))


def recipe() -> dict:
    """What identifies the layer's content (the archive itself moves only with security updates)."""
    return {"suite": SUITE, "packages": PACKAGES, "dropped": DROPPED_PATHS, "uid": UID, "revision": 1}


def build(target: Path) -> None:
    """Write the base file system as a tar. Needs root and mmdebstrap; takes about a minute."""
    if not shutil.which("mmdebstrap"):
        raise BuildError("the base image needs mmdebstrap: apt-get install mmdebstrap")
    with tempfile.TemporaryDirectory(prefix="moonpool-base-") as scratch:
        conf = Path(scratch) / "apt.conf"
        conf.write_text(_host_apt_acquire())
        command = ["mmdebstrap", "--mode=root", "--variant=essential", "--format=tar", "--skip=output/dev"]
        command += [f"--include={','.join(PACKAGES)}", f"--aptopt={conf}"]
        command += [f"--dpkgopt=path-exclude={path}" for path in DROPPED_PATHS if path not in LATE]
        command += [f"--customize-hook={hook}" for hook in _hooks()]
        command += [SUITE, str(target), *_host_sources()]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "SOURCE_DATE_EPOCH": "0"})
    if done.returncode:
        raise BuildError(f"mmdebstrap failed:\n{done.stderr[-3000:]}")


def _hooks() -> list[str]:
    """Shell lines that mmdebstrap runs with the new root as $1."""
    return [
        f'echo "nonroot:x:{UID}:{UID}:nonroot:/tmp:/usr/sbin/nologin" >> "$1/etc/passwd"',
        f'echo "nonroot:x:{UID}:" >> "$1/etc/group"',
        'rm -rf "$1"/var/lib/apt/lists/* "$1"/var/cache/* "$1"/var/log/* "$1"/var/lib/dpkg/info/*.md5sums',
        f'cd "$1" && rm -rf {" ".join("." + path for path in LATE)}',
        'mkdir -p "$1/opt/moonpool"',
    ]


def _host_sources() -> list[str]:
    """The host's own package sources when it runs the same Debian, else mmdebstrap's default mirror."""
    release = Path("/etc/os-release")
    if not release.exists() or f"VERSION_CODENAME={SUITE}" not in release.read_text():
        return []
    folder = Path("/etc/apt/sources.list.d")
    candidates = [folder / "debian.sources", Path("/etc/apt/sources.list")]
    return [str(path) for path in candidates if path.exists() and path.stat().st_size][:1]


def _host_apt_acquire() -> str:
    """The host's apt download settings (proxy, date checks), which its sources may depend on."""
    done = subprocess.run(["apt-config", "dump", "Acquire"], capture_output=True, text=True)
    wanted = ("Acquire::Check", "Acquire::http", "Acquire::https", "Acquire::Retries")
    return "".join(line + "\n" for line in done.stdout.splitlines() if line.startswith(wanted))
