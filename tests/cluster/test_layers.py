"""The layer cache: built once for a recipe, rebuilt when it changes, never taken from an interrupted build."""

import os

import pytest

from images.builder import layers


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MOONPOOL_CACHE", str(tmp_path / "cache"))


def writer(text, calls):
    def build(target):
        calls.append(text)
        target.write_text(text)

    return build


def test_a_recipe_is_built_once():
    calls = []
    first, built = layers.layer("app", {"a": 1, "b": 2}, writer("x", calls))
    again, rebuilt = layers.layer("app", {"b": 2, "a": 1}, writer("x", calls))
    assert (built, rebuilt, calls) == (True, False, ["x"])
    assert first == again
    assert first.digest == layers.file_digest(first.path)


def test_a_new_recipe_replaces_the_old_layer():
    calls = []
    old, _ = layers.layer("deps-worker", {"v": 1}, writer("one", calls))
    other, _ = layers.layer("deps-store", {"v": 1}, writer("store", calls))
    new, _ = layers.layer("deps-worker", {"v": 2}, writer("two", calls))
    assert new.path.read_text() == "two"
    assert not old.path.exists()
    assert other.path.exists()


def test_an_interrupted_build_leaves_no_layer():
    def fails(target):
        target.write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        layers.layer("app", {"v": 1}, fails)
    calls = []
    layer, built = layers.layer("app", {"v": 1}, writer("whole", calls))
    assert built
    assert layer.path.read_text() == "whole"


def test_packing_does_not_depend_on_times(tmp_path):
    root = tmp_path / "root"
    (root / "opt").mkdir(parents=True)
    (root / "opt/file").write_text("content")
    layers.pack(root, tmp_path / "one.tar")
    os.utime(root / "opt/file", (1, 1))
    layers.pack(root, tmp_path / "two.tar")
    assert layers.file_digest(tmp_path / "one.tar") == layers.file_digest(tmp_path / "two.tar")
