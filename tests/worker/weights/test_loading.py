"""What can be loaded, what cannot and why, and that the digest is of what was loaded."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from moonpool_worker.engine.batch import SequenceChunk, StepBatch
from moonpool_worker.kernels.interface import select_backend
from moonpool_worker.models.registry import load_model
from moonpool_worker.weights.errors import ModelLoadError
from moonpool_worker.weights.export import export_safetensors, perturb_gguf
from moonpool_worker.weights.open import open_checkpoint

from tests.worker.models.smollm2 import checkpoint, runner
from tests.worker.weights import tiny_gguf


def load(source: Path) -> tuple[torch.Tensor, str]:
    """Logits after a short prompt, and the digest."""
    with checkpoint(source) as opened:
        model = load_model(opened, "float32", select_backend("torch"))
        digest = opened.digest()
    batch = StepBatch([SequenceChunk(list(range(40, 60)), 0, ([3, 1],))])
    return runner(model, 4).forward(batch), digest


def refusal(source: Path) -> str:
    with pytest.raises(ModelLoadError) as refused:
        load(source)
    message = str(refused.value)
    assert "\n" not in message
    return message


def test_a_file_s_digest_is_what_sha256sum_prints(tmp_path: Path) -> None:
    path = tiny_gguf.write(tmp_path / "model.gguf")
    assert load(path)[1] == "sha256:" + hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_folder_with_one_gguf_is_that_file(tmp_path: Path) -> None:
    path = tiny_gguf.write(tmp_path / "model.gguf")
    assert load(tmp_path)[1] == load(path)[1]


def test_an_exported_folder_is_the_same_model(tmp_path: Path) -> None:
    path, folder = tiny_gguf.write(tmp_path / "model.gguf"), tmp_path / "folder"
    export_safetensors(path, folder, "float32")
    (logits, digest), (expected, _) = load(folder), load(path)
    assert torch.equal(logits, expected)
    lines = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in sorted(folder.iterdir())]
    assert digest == "sha256:" + hashlib.sha256("".join(lines).encode()).hexdigest()
    with checkpoint(folder) as opened, checkpoint(path) as original:
        assert opened.tokenizer().encode("Hello, 世界") == original.tokenizer().encode("Hello, 世界")
        assert opened.tokenizer().eos_ids == original.tokenizer().eos_ids


def test_one_changed_tensor_changes_digest_and_logits(tmp_path: Path) -> None:
    path, other = tiny_gguf.write(tmp_path / "a.gguf"), tmp_path / "b.gguf"
    perturb_gguf(path, other)
    assert path.stat().st_size == other.stat().st_size
    (logits, digest), (others, other_digest) = load(path), load(other)
    assert digest != other_digest
    assert not torch.equal(logits, others)


def test_a_file_that_is_written_meanwhile_is_noticed(tmp_path: Path) -> None:
    path = tiny_gguf.write(tmp_path / "model.gguf")
    with checkpoint(path) as opened, path.open("r+b") as file:
        load_model(opened, "float32", select_backend("torch"))
        file.seek(-1, 2)
        file.write(b"x")
        file.flush()
        with pytest.raises(ModelLoadError, match="written while it was loaded"):
            opened.digest()


def test_a_file_that_is_replaced_meanwhile_does_not_matter(tmp_path: Path) -> None:
    path, other = tiny_gguf.write(tmp_path / "model.gguf"), tmp_path / "other.gguf"
    perturb_gguf(path, other)
    expected = hashlib.sha256(path.read_bytes()).hexdigest()
    with checkpoint(path) as opened:
        other.rename(path)
        # The name is gone from the old file, which counts as a change of the file's state: refused, never mixed up.
        try:
            assert opened.digest() == f"sha256:{expected}"
        except ModelLoadError as refused:
            assert "written while it was loaded" in str(refused)


@pytest.mark.parametrize("keep", [0, 3, 30, 2_000, -100])
def test_a_truncated_file_is_refused(tmp_path: Path, keep: int) -> None:
    path = tiny_gguf.write(tmp_path / "model.gguf")
    path.write_bytes(path.read_bytes()[:keep])
    assert str(path) in refusal(path)


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    assert "there is no model at" in refusal(tmp_path / "absent")
    assert "neither" in refusal(tmp_path)
    text = tmp_path / "model.txt"
    text.write_text("hello")
    assert "must be a .gguf" in refusal(text)
    fake = tmp_path / "fake.gguf"
    fake.write_bytes(b"<html>" * 100)
    assert "does not begin with GGUF" in refusal(fake)


def test_an_unknown_architecture_is_named(tmp_path: Path) -> None:
    message = refusal(tiny_gguf.write(tmp_path / "m.gguf", architecture="mamba"))
    assert "'mamba'" in message
    assert "llama" in message


def test_rope_scaling_is_refused_rather_than_ignored(tmp_path: Path) -> None:
    assert "longrope" in refusal(tiny_gguf.write(tmp_path / "m.gguf", type="longrope"))
    assert "llama.rope.scaling.factor" in refusal(tiny_gguf.write(tmp_path / "n.gguf", type="linear"))


def test_rope_scaling_of_a_gguf_is_applied(tmp_path: Path) -> None:
    plain, _ = load(tiny_gguf.write(tmp_path / "a.gguf"))
    stretched = tiny_gguf.write(tmp_path / "b.gguf", type="linear", factor=2.0)
    with checkpoint(stretched) as opened:
        assert opened.config.rope_scaling == {"rope_type": "linear", "factor": 2.0}
    assert not torch.equal(load(stretched)[0], plain)


def test_missing_and_unknown_tensors_are_named(tmp_path: Path) -> None:
    named = tiny_gguf.tensors()
    del named["blk.1.ffn_down.weight"]
    assert "model.layers.1.mlp.down_proj.weight" in refusal(tiny_gguf.write(tmp_path / "a.gguf", named))
    named = tiny_gguf.tensors() | {"blk.0.attn_q.bias": np.zeros(tiny_gguf.HIDDEN, np.float32)}
    assert "blk.0.attn_q.bias" in refusal(tiny_gguf.write(tmp_path / "b.gguf", named))


def test_broken_safetensors_folders_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    export_safetensors(tiny_gguf.write(tmp_path / "model.gguf"), folder, "float32")
    weights, config = folder / "model.safetensors", folder / "config.json"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-10])
    assert "not a complete safetensors file" in refusal(folder)
    weights.write_bytes(whole)
    raw = json.loads(config.read_text())
    config.write_text(json.dumps(raw | {"model_type": "gpt2"}))
    assert "'gpt2'" in refusal(folder)
    config.write_text("{")
    assert "config.json" in refusal(folder)
    config.unlink()
    assert "no config.json" in refusal(folder)


def test_progress_ends_at_the_total(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    with checkpoint(tiny_gguf.write(tmp_path / "model.gguf")) as opened:
        load_model(opened, "bfloat16", select_backend("torch"), lambda done, total: seen.append((done, total)))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1][0] == seen[-1][1]


@pytest.mark.model
def test_the_packaged_model_is_found_without_importing_its_package() -> None:
    opened = open_checkpoint("smollm2")
    assert opened.config.layers == 30
    opened.close()
