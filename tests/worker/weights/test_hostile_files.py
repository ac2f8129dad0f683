"""Files of hostile shapes are refused with one sentence, whoever asks: ``serve`` or ``digest``."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from moonpool_worker.weights.errors import ModelLoadError
from moonpool_worker.weights.open import open_checkpoint

_LLAMA = {
    "model_type": "llama", "num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 4,
    "intermediate_size": 96, "vocab_size": 64, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
}  # fmt: skip


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "null",
        "[" * 100_000,
        json.dumps(_LLAMA | {"model_type": ["llama"]}),
        json.dumps(_LLAMA | {"quantization_config": "fp8"}),
    ],
    ids=["list", "null", "deep", "model_type", "quantization"],
)
def test_configuration(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelLoadError, match=r"config\.json|not supported"):
        open_checkpoint(tmp_path)


def _text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


@pytest.mark.parametrize(
    ("key", "kind", "value"),
    [
        (b"general.alignment", 8, _text(b"none")),
        (b"general.alignment", 6, struct.pack("<f", float("nan"))),
        (b"general.architecture", 9, struct.pack("<IQI", 4, 1, 3)),
    ],
    ids=["text", "nan", "array"],
)
def test_gguf_field(tmp_path: Path, key: bytes, kind: int, value: Any) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + _text(key) + struct.pack("<I", kind) + value)
    with pytest.raises(ModelLoadError):
        open_checkpoint(path)
