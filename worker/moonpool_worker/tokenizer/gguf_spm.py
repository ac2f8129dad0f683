"""SentencePiece's BPE (Kudo and Richardson, 2018) from a GGUF's pieces and scores, as a ``tokenizers`` model.

SentencePiece joins the two neighbours whose union has the best score. ``tokenizers`` joins by a list of merges, so each
piece becomes a merge of every two pieces that it can be cut into, the better scores first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers

from moonpool_worker.weights.errors import ModelLoadError

#: What stands for a space within pieces.
_SPACE = "\u2581"
_NORMAL, _BYTE = 1, 6


def spm_backend(field: Callable[..., Any]) -> Tokenizer:
    """From ``field(key, default)``, the GGUF's metadata; its special tokens are yet to be added. Raises ModelLoadError
    when pieces, scores and types do not fit together."""
    pieces: list[str] = field("tokenizer.ggml.tokens")
    scores: list[float] = field("tokenizer.ggml.scores", [])
    kinds: list[int] = field("tokenizer.ggml.token_type", [])
    if not len(pieces) == len(scores) == len(kinds):
        raise ModelLoadError(f"the GGUF's tokenizer has {len(pieces)} pieces, {len(scores)} scores, {len(kinds)} types")
    unknown = field("tokenizer.ggml.unknown_token_id", 0)
    backend = Tokenizer(
        models.BPE(
            vocab={piece: number for number, piece in enumerate(pieces)},
            merges=_merges(pieces, scores, kinds),
            unk_token=pieces[unknown],
            fuse_unk=True,
            byte_fallback=_BYTE in kinds,
        )
    )
    spaces: list[normalizers.Normalizer] = [normalizers.Replace(" ", _SPACE)]
    decoding: list[decoders.Decoder] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if field("tokenizer.ggml.add_space_prefix", True):
        spaces.insert(0, normalizers.Prepend(_SPACE))
        decoding.append(decoders.Strip(" ", 1, 0))
    backend.normalizer = normalizers.Sequence(spaces)
    backend.decoder = decoders.Sequence(decoding)
    return backend


def _merges(pieces: Sequence[str], scores: Sequence[float], kinds: Sequence[int]) -> list[tuple[str, str]]:
    normal = {
        piece: (-score, number)
        for number, (piece, score, kind) in enumerate(zip(pieces, scores, kinds, strict=True))
        if kind == _NORMAL
    }

    def cuts(piece: str) -> Iterator[tuple[str, str]]:
        for at in range(1, len(piece)):
            if piece[:at] in normal and piece[at:] in normal:
                yield piece[:at], piece[at:]

    return [cut for piece in sorted(normal, key=normal.__getitem__) for cut in cuts(piece)]
