"""Where the C++ kernels come from, and what happens where they cannot be."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from moonpool_worker.kernels.cpu import build, library
from moonpool_worker.kernels.interface import BackendError, select_backend
from moonpool_worker.settings import Settings, SettingsError

from tests.worker.kernels.cpu_case import cpu_kernels


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """Each test looks for the library anew, and leaves none of its own."""
    library.library.cache_clear()
    yield
    library.library.cache_clear()


def test_without_a_compiler_torch_computes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv(library.VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(library, "_cpu_flags", lambda: set(library._NEEDED))
    assert select_backend("auto").name == "torch"
    with pytest.raises(BackendError, match=r"there is no g\+\+"):
        select_backend("cpu")


def test_without_the_instructions_torch_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(library, "_cpu_flags", lambda: set(library._NEEDED) - {"avx512_bf16"})
    assert select_backend("auto").name == "torch"
    with pytest.raises(BackendError, match="lacks avx512_bf16"):
        select_backend("cpu")


def test_a_prebuilt_library_is_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cpu_kernels()
    library.library.cache_clear()
    target = tmp_path / "kernels.so"
    subprocess.run([sys.executable, "-m", build.__name__, str(target)], check=True)
    monkeypatch.setenv(library.VARIABLE, str(target))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cpu_kernels().name == "cpu"


def test_a_library_of_other_sources_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    path = cpu_kernels()._lib._name
    library.library.cache_clear()
    monkeypatch.setattr(library, "source_digest", lambda: "0" * 16)
    monkeypatch.setenv(library.VARIABLE, path)
    with pytest.raises(library.Unavailable, match="other sources"):
        library.library()


def test_only_the_cpu_backend_quantises() -> None:
    with pytest.raises(BackendError, match="torch does not quantise"):
        select_backend("torch", "int8")
    with pytest.raises(SettingsError, match="drop it, or"):
        Settings(model="m", quantization="int8", dtype="float32").check()


def test_a_library_that_was_written_in_part_is_compiled_anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(library.VARIABLE, raising=False)
    monkeypatch.setattr(library, "BESIDE", tmp_path / "none.so")
    broken = tmp_path / "moonpool" / "kernels" / f"kernels-{build.source_digest()}.so"
    broken.parent.mkdir(parents=True)
    broken.write_bytes(b"\x7fELF")
    compiled: list[Path] = []
    monkeypatch.setattr(library, "compile_library", compiled.append)
    assert library._find() == broken
    assert compiled == [broken]


def test_a_user_without_a_home_computes_with_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv(library.VARIABLE, raising=False)
    monkeypatch.setattr(library, "BESIDE", tmp_path / "none.so")
    monkeypatch.setattr(library.Path, "home", homeless)
    with pytest.raises(library.Unavailable, match="home"):
        library._find()
