"""When a cached build counts as complete."""

import pytest

from e2e.cluster import golang
from e2e.cluster.errors import ClusterError


@pytest.fixture
def program(tmp_path):
    module = tmp_path / "module"
    module.mkdir()
    (module / "go.mod").write_text("module x\n")
    (module / "go.sum").write_text("")
    return golang.GoProgram("x", module, tmp_path / "bin", ("etcd", "kubectl"), renames={"server": "etcd"})


def built(tmp_path, *names):
    folder = tmp_path / "built"
    folder.mkdir()
    for name in names:
        (folder / name).write_text("#!/bin/sh\n")
        (folder / name).chmod(0o755)
    return folder


def test_a_finished_build_is_complete_and_renamed(program, tmp_path):
    golang.finish(program, built(tmp_path, "server", "kubectl"))
    assert golang.is_complete(program)
    assert (program.target / "etcd").exists()


def test_programs_without_a_marker_are_an_interrupted_build(program, tmp_path):
    built(tmp_path, "etcd", "kubectl").rename(program.target)
    assert not golang.is_complete(program)


def test_another_go_sum_is_another_build(program, tmp_path):
    golang.finish(program, built(tmp_path, "server", "kubectl"))
    (program.module / "go.sum").write_text("y v1 h1:z\n")
    assert not golang.is_complete(program)


def test_a_missing_program_is_named(program, tmp_path):
    with pytest.raises(ClusterError, match="kubectl"):
        golang.finish(program, built(tmp_path, "server"))
    assert not golang.is_complete(program)


def test_a_removed_program_is_noticed(program, tmp_path):
    golang.finish(program, built(tmp_path, "server", "kubectl"))
    (program.target / "kubectl").unlink()
    assert not golang.is_complete(program)


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("go version go1.26.1 linux/amd64", (1, 26)),
        ("go version go1.19.8 linux/amd64", (1, 19)),
        ("go version devel go1.27-abc Mon linux/amd64", (1, 27)),
        ("bash: go: not found", (0, 0)),
    ],
)
def test_go_versions(text, version):
    assert golang.parse_go_version(text) == version
