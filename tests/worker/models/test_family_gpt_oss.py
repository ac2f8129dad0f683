"""gpt-oss beside transformers, several windows long and with YaRN; and its experts in MXFP4."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from moonpool_worker.kernels.interface import select_backend
from moonpool_worker.models.mxfp4 import unpack_mxfp4
from moonpool_worker.models.registry import load_model
from moonpool_worker.weights.errors import ModelLoadError
from moonpool_worker.weights.open import open_checkpoint
from safetensors.torch import load_file, save_file
from transformers import GptOssConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.worker.models.family_case import Case, FamilyCase, FamilyChecks, Text, reference_model
from tests.worker.models.smollm2 import checkpoint

CONFIG = GptOssConfig(
    vocab_size=128,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=128,
    num_local_experts=6,
    num_experts_per_tok=2,
    sliding_window=20,
    # So narrow that clamping matters.
    swiglu_limit=1.5,
    pad_token_id=0,
    rope_parameters={
        "rope_type": "yarn",
        "rope_theta": 100.0,
        "factor": 4.0,
        "beta_fast": 4.0,
        "beta_slow": 0.5,
        "truncate": False,
        "original_max_position_embeddings": 32,
    },
)


class TestGptOss(FamilyChecks):
    config = CONFIG

    def test_every_other_layer_has_the_window(self, case: FamilyCase) -> None:
        full, window = case.geometry.groups
        assert (full.window, full.layers) == (None, (1, 3))
        assert (window.window, window.layers) == (20, (0, 2))


def test_mxfp4_is_unpacked_as_transformers_does() -> None:
    torch.manual_seed(0)
    blocks = torch.randint(0, 256, (3, 24, 2, 16), dtype=torch.uint8)
    scales = torch.randint(118, 132, (3, 24, 2), dtype=torch.uint8)
    # theirs is transposed.
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).transpose(1, 2)
    for expert in range(3):
        assert torch.equal(unpack_mxfp4(blocks[expert], scales[expert], torch.float32), expected[expert])


@pytest.fixture
def packed(tmp_path: Path) -> tuple[Path, Path]:
    """A folder with experts in MXFP4 as they are released, and one with the same numbers in float32."""
    folders = tmp_path / "packed", tmp_path / "plain"
    for folder in folders:
        reference_model(CONFIG).save_pretrained(folder)
    tensors = load_file(folders[1] / "model.safetensors")
    stored = dict(tensors)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        count, width, rows = tensors[name].shape
        blocks = torch.randint(0, 256, (count, rows, width // 32, 16), dtype=torch.uint8)
        scales = torch.randint(122, 126, (count, rows, width // 32), dtype=torch.uint8)
        tensors[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
        del stored[name]
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(stored, folders[0] / "model.safetensors")
    save_file(tensors, folders[1] / "model.safetensors")
    amend(folders[0], quantization_config={"quant_method": "mxfp4"})
    return folders


def amend(folder: Path, **fields: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_experts_in_mxfp4_are_the_same_model(packed: tuple[Path, Path]) -> None:
    ids = list(range(40))
    results = []
    for folder in packed:
        with checkpoint(folder) as opened:
            case = Case(load_model(opened, "float32", select_backend("torch")))
        results.append((Text(case).feed(ids), case.runner.model.weight_bytes))
    assert torch.equal(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]


def test_another_quantisation_is_refused_by_name(packed: tuple[Path, Path]) -> None:
    amend(packed[0], quantization_config={"quant_method": "awq"})
    with pytest.raises(ModelLoadError, match="quantised as awq"):
        open_checkpoint(packed[0])
