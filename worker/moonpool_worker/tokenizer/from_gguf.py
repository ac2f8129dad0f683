"""The tokenizer that a GGUF file carries in its metadata (byte-level BPE)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from moonpool_worker.tokenizer.tokenizer import Tokenizer as MoonpoolTokenizer
from moonpool_worker.weights.errors import ModelLoadError

_CONTROL, _USER_DEFINED = 3, 4
_QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _pre_tokenizer(kind: str) -> pre_tokenizers.PreTokenizer:
    if kind in ("smollm", "starcoder", "refact", "command-r"):
        return pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    if kind in ("gpt-2", "gpt2", "default"):
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if kind == "qwen2":
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(_QWEN2_SPLIT), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    raise ModelLoadError(f"the GGUF's pre-tokenizer {kind!r} is not supported: use the model's safetensors folder")


def tokenizer_from_gguf(field: Callable[..., Any]) -> MoonpoolTokenizer:
    """Build it from ``field(key, default)``, the GGUF's metadata. Raises ModelLoadError for other kinds than BPE."""
    kind = field("tokenizer.ggml.model", "none")
    if kind != "gpt2":
        raise ModelLoadError(f"the GGUF's tokenizer is of kind {kind!r}; only byte-level BPE (gpt2) is supported")
    tokens: list[str] = field("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ", 1)) for merge in field("tokenizer.ggml.merges", [])]
    backend = Tokenizer(models.BPE(vocab={text: i for i, text in enumerate(tokens)}, merges=merges))
    backend.pre_tokenizer = _pre_tokenizer(field("tokenizer.ggml.pre", "default"))
    backend.decoder = decoders.ByteLevel()
    types = field("tokenizer.ggml.token_type", [])
    for token, token_type in zip(tokens, types, strict=False):
        if token_type in (_CONTROL, _USER_DEFINED):
            backend.add_special_tokens([AddedToken(token, special=token_type == _CONTROL, normalized=False)])
    eos = {field("tokenizer.ggml.eos_token_id"), field("tokenizer.ggml.eot_token_id")}
    return MoonpoolTokenizer(
        backend,
        eos_ids={int(i) for i in eos if i is not None},
        bos_id=field("tokenizer.ggml.bos_token_id"),
        add_bos=bool(field("tokenizer.ggml.add_bos_token", False)),
        chat_template=field("tokenizer.chat_template"),
    )
