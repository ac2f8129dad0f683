"""The tokenizer that a GGUF file carries in its metadata: byte-level BPE, or SentencePiece's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from moonpool_worker.tokenizer.gguf_spm import spm_backend
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


def _bpe_backend(field: Callable[..., Any]) -> Tokenizer:
    tokens: list[str] = field("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ", 1)) for merge in field("tokenizer.ggml.merges", [])]
    backend = Tokenizer(models.BPE(vocab={text: i for i, text in enumerate(tokens)}, merges=merges))
    backend.pre_tokenizer = _pre_tokenizer(field("tokenizer.ggml.pre", "default"))
    backend.decoder = decoders.ByteLevel()
    return backend


def tokenizer_from_gguf(field: Callable[..., Any]) -> MoonpoolTokenizer:
    """Build it from ``field(key, default)``, the GGUF's metadata. Raises ModelLoadError for other kinds than BPE."""
    kind = field("tokenizer.ggml.model", "none")
    if kind not in ("gpt2", "llama"):
        raise ModelLoadError(
            f"the GGUF's tokenizer is of kind {kind!r}; byte-level BPE (gpt2) and SentencePiece's (llama) are supported"
        )
    backend = _bpe_backend(field) if kind == "gpt2" else spm_backend(field)
    tokens, kinds = field("tokenizer.ggml.tokens"), field("tokenizer.ggml.token_type", [])
    backend.add_special_tokens(_added(tokens, kinds, _CONTROL))
    backend.add_tokens(_added(tokens, kinds, _USER_DEFINED))
    eos = {field("tokenizer.ggml.eos_token_id"), field("tokenizer.ggml.eot_token_id")}
    return MoonpoolTokenizer(
        backend,
        eos_ids={int(i) for i in eos if i is not None},
        bos_id=field("tokenizer.ggml.bos_token_id"),
        # SentencePiece models begin with a start token unless the file says otherwise.
        add_bos=bool(field("tokenizer.ggml.add_bos_token", kind == "llama")),
        chat_template=field("tokenizer.chat_template"),
    )


def _added(tokens: Sequence[str], kinds: Sequence[int], kind: int) -> list[AddedToken]:
    return [
        AddedToken(token, special=kind == _CONTROL, normalized=False)
        for token, found in zip(tokens, kinds, strict=False)
        if found == kind
    ]
