"""The small decisions of the image builder: requirements, console scripts, stubs."""

import os

import pytest

from images.builder import deps, prune, stubs

READELF = """
Symbol table '.dynsym' contains 4 entries:
   Num:    Value          Size Type    Bind   Vis      Ndx Name
     0: 0000000000000000     0 NOTYPE  LOCAL  DEFAULT  UND
     1: 0000000000000000     0 FUNC    GLOBAL DEFAULT  UND cublasCreate_v2@libcublas.so.13 (5)
     2: 0000000000001000    16 FUNC    GLOBAL DEFAULT   12 ncclSend
     3: 0000000000001010    16 FUNC    GLOBAL DEFAULT   12 cufftExec@@libcufft.so.12
"""


@pytest.mark.parametrize(
    ("requirement", "name"),
    [("httpx[http2]>=0.28", "httpx"), ("PyYAML>=6.0", "pyyaml"), ("torch==2.13.0", "torch"), ("rich ; x", "rich")],
)
def test_requirement_names(requirement, name):
    assert deps.requirement_name(requirement) == name


def test_a_script_gets_the_image_python_without_touching_the_hard_link(tmp_path):
    cached, script = tmp_path / "cached", tmp_path / "smg"
    cached.write_text("#!/home/me/.venv/bin/python\nprint(1)\n")
    cached.chmod(0o755)
    os.link(cached, script)
    deps.rewrite_shebang(script)
    assert script.read_text() == "#!/usr/bin/python3\nprint(1)\n"
    assert os.access(script, os.X_OK)
    assert cached.read_text().startswith("#!/home/me")


def test_other_scripts_stay_as_they_are(tmp_path):
    script = tmp_path / "run"
    script.write_bytes(b"\x7fELF...")
    deps.rewrite_shebang(script)
    assert script.read_bytes() == b"\x7fELF..."


def test_symbols_are_split_into_defined_and_undefined():
    defined, undefined = stubs.parse_symbols(READELF)
    assert defined == {"ncclSend": None, "cufftExec": "libcufft.so.12"}
    assert undefined == {"cublasCreate_v2": "libcublas.so.13"}


def test_a_stub_exports_only_what_is_imported_with_the_version_asked_for():
    defined = {"cublasCreate_v2": "libcublas.so.13", "unused": "libcublas.so.13"}
    symbols = stubs.wanted(defined, [{"cublasCreate_v2": "libcublas.so.13", "malloc": "GLIBC_2.2.5"}])
    assert symbols == {"cublasCreate_v2": "libcublas.so.13"}
    assert stubs.version_script(symbols) == "libcublas.so.13 { global: cublasCreate_v2; };\n"
    assert stubs.version_script({"ncclSend": None}) == ""


def test_pruning_removes_files_and_folders_and_ignores_what_is_absent(tmp_path):
    (tmp_path / "torch/include/deep").mkdir(parents=True)
    (tmp_path / "torch/lib").mkdir()
    (tmp_path / "torch/lib/libx.a").write_text("")
    (tmp_path / "torch/lib/libx.so").write_text("")
    prune.apply(prune.Rules(remove=("torch/include", "torch/lib/*.a", "none/*")), tmp_path)
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["libx.so"]
    assert not (tmp_path / "torch/include").exists()
