"""A family's GGUF form is the same model as its folder: names as the ``gguf`` package maps them, metadata as exporters
write it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from moonpool_worker.kernels.interface import select_backend
from moonpool_worker.models.registry import load_model
from moonpool_worker.weights.checkpoint import Checkpoint
from safetensors.torch import load_file
from transformers import Gemma3TextConfig, PretrainedConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from tests.worker.models.family_case import Case, Text, reference_model
from tests.worker.models.smollm2 import checkpoint

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
CONFIGS: dict[str, PretrainedConfig] = {
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True),
    "qwen3moe": Qwen3MoeConfig(
        **SIZES, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, norm_topk_prob=True
    ),
    # Eight layers, so that one keeps all of the text: the files do not say which.
    "gemma3": Gemma3TextConfig(
        **(SIZES | {"num_hidden_layers": 8}), head_dim=16, query_pre_attn_scalar=16, sliding_window=17
    ),
}


def write(path: Path, architecture: str, config: PretrainedConfig, tensors: dict[str, torch.Tensor]) -> Path:
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    if hasattr(config, "head_dim"):
        writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    if architecture == "qwen3moe":
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        tensors = stacked(tensors, config.num_experts)
    if architecture == "gemma3":
        writer.add_sliding_window(config.sliding_window)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([f"t{number}" for number in range(config.vocab_size)])
    (known,) = (number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(known, config.num_hidden_layers)
    for name, tensor in tensors.items():
        stored = tensor + 1 if architecture == "gemma3" and name.endswith("norm.weight") else tensor
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), stored.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def stacked(tensors: dict[str, torch.Tensor], experts: int) -> dict[str, torch.Tensor]:
    """The experts' matrices of a layer as one tensor."""
    found = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for name in tensors:
        if ".experts.0." in name:
            parts = [tensors[name.replace("experts.0.", f"experts.{expert}.")] for expert in range(experts)]
            found[name.replace("experts.0.", "experts.")] = torch.stack(parts)
    return found


def logits(opened: Checkpoint) -> torch.Tensor:
    case = Case(load_model(opened, "float32", select_backend("torch")))
    return Text(case).feed([(7 * number) % 64 for number in range(50)])


@pytest.mark.parametrize("architecture", CONFIGS)
def test_a_gguf_is_the_model_of_its_folder(architecture: str, tmp_path: Path) -> None:
    config, folder = CONFIGS[architecture], tmp_path / "folder"
    reference_model(config).save_pretrained(folder)
    path = write(tmp_path / "m.gguf", architecture, config, load_file(folder / "model.safetensors"))
    with checkpoint(folder) as opened, checkpoint(path) as same:
        torch.testing.assert_close(logits(same), logits(opened), atol=1e-5, rtol=0)
