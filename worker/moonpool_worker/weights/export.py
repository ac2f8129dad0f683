"""Write checkpoints: a Hugging Face folder from any checkpoint, and a GGUF that differs in one tensor.

Other engines read the folder (the vLLM peer of the benchmarks); the second weights file shows that changed weights
under an unchanged version are noticed.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import gguf
import torch
from safetensors.torch import save_file

from moonpool_worker.models.config import AttentionConfig, ModelConfig
from moonpool_worker.models.dtype import resolve_dtype
from moonpool_worker.tokenizer.tokenizer import Tokenizer
from moonpool_worker.weights.checkpoint import Checkpoint
from moonpool_worker.weights.errors import ModelLoadError
from moonpool_worker.weights.open import open_checkpoint

#: What transformers calls the classes of our architectures.
_CLASSES = {"llama": "LlamaForCausalLM"}


def export_safetensors(source: str | Path, folder: Path, dtype: str = "bfloat16") -> None:
    """Write ``source`` as config.json, tokenizer files and model.safetensors in ``dtype`` into ``folder``."""
    checkpoint = open_checkpoint(source)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {name: _whole(checkpoint, name, resolve_dtype(dtype)) for name in checkpoint.names()}
        save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
        tokenizer = checkpoint.tokenizer()
        (folder / "config.json").write_text(json.dumps(_config(checkpoint.config, tokenizer, dtype), indent=1))
        _write_tokenizer(tokenizer, folder)
    finally:
        checkpoint.close()


def perturb_gguf(source: Path, target: Path) -> None:
    """Copy a GGUF with the final norm's first weight changed: the same model but for one tensor."""
    shutil.copyfile(source, target)
    reader = gguf.GGUFReader(str(target), "r+")
    tensor = next(tensor for tensor in reader.tensors if tensor.name == "output_norm.weight")
    tensor.data[0] *= 1.01
    reader.data.flush()


def _whole(checkpoint: Checkpoint, name: str, dtype: torch.dtype) -> torch.Tensor:
    whole = torch.empty(checkpoint.shape(name), dtype=dtype)
    for first, rows in checkpoint.rows(name):
        whole[first : first + rows.shape[0]] = rows
    return whole


def _config(config: ModelConfig, tokenizer: Tokenizer, dtype: str) -> dict:
    if not isinstance(config, AttentionConfig) or config.architecture not in _CLASSES:
        raise ModelLoadError(f"{config.architecture} cannot be exported; only {', '.join(_CLASSES)} can")
    return {
        "architectures": [_CLASSES[config.architecture]],
        "model_type": config.architecture,
        "hidden_act": "silu",
        "hidden_size": config.hidden,
        "intermediate_size": config.ffn,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab,
        "max_position_embeddings": config.context_length,
        "rope_theta": config.rope_theta,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": dtype,
        "eos_token_id": min(tokenizer.eos_ids) if tokenizer.eos_ids else None,
    }


def _write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    eos = tokenizer.backend.id_to_token(min(tokenizer.eos_ids)) if tokenizer.eos_ids else None
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": eos,
        "chat_template": tokenizer.template_text,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
