"""Stub shared libraries: the same name, the same symbols, and a clear message when one is called."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from images.builder.errors import BuildError

SOURCE = """#include <stdio.h>
#include <stdlib.h>
static void refuse(const char *name) {
  fprintf(stderr, "%s: this image is for CPUs, its CUDA libraries are stubs\\n", name);
  abort();
}
"""


def parse_symbols(listing: str) -> tuple[dict[str, str | None], dict[str, str | None]]:
    """`readelf --dyn-syms -W` → (defined, undefined), each {symbol: version or None}."""
    defined: dict[str, str | None] = {}
    undefined: dict[str, str | None] = {}
    for line in listing.splitlines():
        fields = line.split()
        # Num: Value Size Type Bind Vis Ndx Name[@version] [(index)]
        if len(fields) < 8 or not fields[0].rstrip(":").isdigit():
            continue
        name, _, version = fields[7].replace("@@", "@").partition("@")
        (undefined if fields[6] == "UND" else defined)[name] = version or None
    return defined, undefined


def wanted(defined: dict[str, str | None], imports: Iterable[dict[str, str | None]]) -> dict[str, str | None]:
    """The symbols of a library that its callers import, with the versions they ask for."""
    return {name: version for each in imports for name, version in each.items() if name in defined}


def version_script(symbols: dict[str, str | None]) -> str:
    """A linker script that gives each symbol its version."""
    versions: dict[str, list[str]] = {}
    for name, version in symbols.items():
        if version:
            versions.setdefault(version, []).append(name)
    return "".join(
        f"{version} {{ global: {' '.join(f'{name};' for name in sorted(names))} }};\n"
        for version, names in sorted(versions.items())
    )


def replace(library: Path, callers: Sequence[Path]) -> None:
    """Replace a library by a stub that exports what the callers import from it. Needs gcc; without it, keeps it."""
    if not shutil.which("gcc"):
        return
    defined, _ = parse_symbols(_dynamic_symbols(library))
    symbols = wanted(defined, (parse_symbols(_dynamic_symbols(caller))[1] for caller in callers))
    with tempfile.TemporaryDirectory() as scratch:
        source, script, stub = (Path(scratch) / name for name in ("stub.c", "stub.map", "stub.so"))
        lines = [f'void {name}(void) {{ refuse("{name}"); }}' for name in sorted(symbols)]
        source.write_text(SOURCE + "\n".join(lines) + "\n")
        command = ["gcc", "-shared", "-fPIC", "-O1", "-s", f"-Wl,-soname,{library.name}", "-Wl,--build-id=none"]
        if text := version_script(symbols):
            script.write_text(text)
            command.append(f"-Wl,--version-script={script}")
        done = subprocess.run([*command, "-o", str(stub), str(source)], capture_output=True, text=True)
        if done.returncode:
            raise BuildError(f"the stub of {library.name} does not compile: {done.stderr[-1500:]}")
        library.unlink()
        shutil.copy(stub, library)


def _dynamic_symbols(library: Path) -> str:
    done = subprocess.run(["readelf", "--dyn-syms", "-W", str(library)], capture_output=True, text=True)
    if done.returncode:
        raise BuildError(f"readelf {library.name} failed: {done.stderr[-500:]}")
    return done.stdout
