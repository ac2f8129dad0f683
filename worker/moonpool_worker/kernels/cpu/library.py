"""Find the compiled kernels, or compile them, and say why not where that cannot be."""

from __future__ import annotations

import ctypes
import functools
import os
from ctypes import POINTER, c_char_p, c_float, c_int, c_int64, c_void_p
from pathlib import Path

from moonpool_worker.kernels.cpu import structures
from moonpool_worker.kernels.cpu.build import BESIDE, BuildFailed, compile_library, source_digest
from moonpool_worker.kernels.threads import usable_cpus

#: The path of a library that was compiled before.
VARIABLE = "MOONPOOL_KERNELS"
_NEEDED = ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16")

_SIGNATURES: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "mp_set_threads": (None, (c_int,)),
    "mp_packed_bytes": (c_int64, (c_int, c_int, c_int)),
    "mp_pack": (c_int, (c_int, c_void_p, c_int, c_void_p, c_int, c_int, c_int)),
    "mp_linear": (None, (POINTER(structures.Weights), c_void_p, c_int64, c_int, c_void_p)),
    "mp_rms_norm": (None, (c_void_p, c_int64, c_void_p, c_void_p, c_int, c_float, c_int64, c_int, c_void_p)),
    "mp_rope": (None, (c_void_p, c_int64, c_void_p, c_void_p, c_int64, c_int, c_int, c_void_p)),
    "mp_argmax": (None, (c_void_p, c_int, c_int, c_void_p)),
    "mp_silu_mul": (None, (c_void_p, c_int64, c_int, c_void_p)),
    "mp_write_rows": (None, (c_void_p, c_int64, c_void_p, c_void_p, c_int64, c_int, c_void_p, c_int64)),
    "mp_attention": (None, (POINTER(structures.Attention), POINTER(structures.Cache))),
    "mp_decoder": (None, (POINTER(structures.Decoder), POINTER(structures.Step))),
}


class Unavailable(Exception):
    """Why the C++ kernels cannot be used here, in one sentence."""


@functools.cache
def library() -> ctypes.CDLL:
    """The kernels, with as many threads as there are usable CPUs. Raises Unavailable."""
    lacking = [flag for flag in _NEEDED if flag not in _cpu_flags()]
    if lacking:
        raise Unavailable(f"this CPU lacks {', '.join(lacking)}")
    loaded = _load(_find())
    loaded.mp_set_threads(usable_cpus())
    return loaded


def _find() -> Path:
    prebuilt = os.environ.get(VARIABLE)
    if prebuilt:
        return Path(prebuilt)
    if BESIDE.exists():
        return BESIDE
    # RuntimeError: a user without a home folder.
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moonpool" / "kernels"
        path = cache / f"kernels-{source_digest()}.so"
        if not _is_whole(path):
            compile_library(path)
    except (BuildFailed, OSError, RuntimeError) as failure:
        raise Unavailable(f"the C++ kernels cannot be compiled: {failure}") from failure
    return path


def _is_whole(path: Path) -> bool:
    """Whether a library that was compiled before is there, and not one that a full disk or a power cut left in part."""
    if not path.exists():
        return False
    try:
        _load(path)
    except Unavailable:
        return False
    return True


def _load(path: Path) -> ctypes.CDLL:
    try:
        loaded = ctypes.CDLL(str(path))
        loaded.mp_sources.restype = c_char_p
    except (OSError, AttributeError) as failure:
        raise Unavailable(f"{path} cannot be loaded: {failure}") from failure
    if loaded.mp_sources() != source_digest().encode():
        raise Unavailable(f"{path} was compiled from other sources")
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    return loaded


def _cpu_flags() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return next((set(line.split(":", 1)[1].split()) for line in lines if line.startswith("flags")), set())
