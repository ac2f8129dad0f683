"""Makes the CPU worker's dependencies small: what only a GPU would use is removed or replaced by a stub.

PyPI's torch for Linux is the CUDA build. On a CPU its CUDA libraries are loaded (they are in the link chain of
`libtorch_python.so`) and never called. What is only opened on demand can go; what the loader insists on becomes a
stub with the same symbols. This is for the CPU image alone: the Containerfile of a GPU worker installs everything.
"""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path

from images.builder import stubs


@dataclass(frozen=True)
class Rules:
    """`remove`: glob patterns below the package folder. `stub`: libraries to replace, also as patterns.

    `callers`: the libraries whose imports a stub must satisfy. `strip`: libraries that lose their symbol tables.
    """

    remove: tuple[str, ...] = ()
    stub: tuple[str, ...] = ()
    callers: tuple[str, ...] = ()
    strip: tuple[str, ...] = ()

    def identity(self) -> dict:
        return asdict(self)


CPU_TORCH = Rules(
    remove=(
        # Opened on demand, by a GPU's code path only.
        "nvidia/cudnn/lib/libcudnn_*.so*",
        "nvidia/cu13/lib/libnvrtc-builtins*",
        "nvidia/cu13/lib/libnvrtc.alt*",
        "nvidia/cu13/lib/libcusolver*",
        "nvidia/cu13/lib/libnvJitLink*",
        "nvidia/cu13/lib/libnvperf*",
        "nvidia/cu13/lib/libcufftw*",
        "nvidia/cu13/lib/libnvblas*",
        "nvidia/nvshmem/lib/nvshmem_*",
        "nvidia/nvshmem/lib/*.bc",
        "nvidia/**/*.a",
        "nvidia/**/include",
        "torch/lib/libtorch_cuda_linalg.so",
        "torch/include",
        "torch/lib/*.a",
        "torch/share",
        "torch/bin/protoc*",
        # Triton's profiler and the tools that turn its output into GPU code. `import triton` and its interpreter work.
        "triton/backends/nvidia/lib/cupti",
        "triton/backends/nvidia/bin",
        "triton/backends/*/include",
        "triton/_C/libproton.so",
        "triton/instrumentation",
        "triton/plugins",
        "cuda/bindings/**/*.pxd",
        "mooncake/transfer_engine_bench",
        "numpy/**/tests",
        "networkx/**/tests",
        "sympy/**/tests",
    ),
    stub=(
        "nvidia/cu13/lib/libcublas.so.13",
        "nvidia/cu13/lib/libcublasLt.so.13",
        "nvidia/cu13/lib/libcufft.so.12",
        "nvidia/cu13/lib/libcurand.so.10",
        "nvidia/cu13/lib/libcusparse.so.12",
        "nvidia/cu13/lib/libnvrtc.so.13",
        "nvidia/cusparselt/lib/libcusparseLt.so.0",
        "nvidia/nccl/lib/libnccl.so.2",
        "nvidia/nvshmem/lib/libnvshmem_host.so.3",
    ),
    callers=("torch/lib/*.so",),
    # 440 MB of symbol tables that only a debugger reads.
    strip=("triton/_C/libtriton.so", "torch/lib/libtorch_cpu.so", "torch/lib/libtorch_cuda.so"),
)


def apply(rules: Rules, packages: Path) -> None:
    """Apply the rules to an installed package folder. A pattern that matches nothing is no error."""
    for pattern in rules.remove:
        for path in list(packages.glob(pattern)):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
    callers = [path for pattern in rules.callers for path in packages.glob(pattern)]
    for pattern in rules.stub:
        for library in packages.glob(pattern):
            stubs.replace(library, callers)
    for pattern in rules.strip:
        for library in packages.glob(pattern):
            strip(library)


def strip(library: Path) -> None:
    """Remove a library's symbol table. Replaces the file: it may be a hard link into uv's cache."""
    if not shutil.which("strip"):
        return
    stripped = library.with_suffix(".stripped")
    subprocess.run(["strip", "--strip-unneeded", "-o", str(stripped), str(library)], check=True, capture_output=True)
    stripped.replace(library)
