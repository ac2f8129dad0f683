"""SentencePiece's BPE from a GGUF, on a vocabulary small enough to follow."""

from __future__ import annotations

from typing import Any

import pytest
from moonpool_worker.tokenizer.from_gguf import tokenizer_from_gguf
from moonpool_worker.tokenizer.tokenizer import Tokenizer
from moonpool_worker.weights.errors import ModelLoadError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
PIECES: list[tuple[str, float, int]] = [
    ("<unk>", 0.0, UNKNOWN),
    ("<s>", 0.0, CONTROL),
    ("</s>", 0.0, CONTROL),
    *((f"<0x{value:02X}>", 0.0, BYTE) for value in range(256)),
    ("  ", -1000.0, USER_DEFINED),
    ("▁", -9.0, NORMAL),
    ("a", -9.0, NORMAL),
    ("b", -9.0, NORMAL),
    ("c", -9.0, NORMAL),
    # The better score of "bc" comes before the longer "abc", which "ab" and "c" could make.
    ("bc", -1.0, NORMAL),
    ("ab", -2.0, NORMAL),
    ("▁a", -3.0, NORMAL),
    ("abab", -4.0, NORMAL),
]


def tokenizer(**fields: Any) -> Tokenizer:
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [piece for piece, _, _ in PIECES],
        "tokenizer.ggml.scores": [score for _, score, _ in PIECES],
        "tokenizer.ggml.token_type": [kind for _, _, kind in PIECES],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        **{f"tokenizer.ggml.{name}": value for name, value in fields.items()},
    }
    return tokenizer_from_gguf(metadata.get)


def pieces(of: Tokenizer, text: str) -> list[str]:
    return [PIECES[token][0] for token in of.encode(text)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("abc", ["a", "bc"]),
        ("abab", ["abab"]),
        ("a  b", ["a", "  ", "b"]),
        ("b a", ["b", "▁a"]),
        ("bé", ["b", "<0xC3>", "<0xA9>"]),
        ("b</s>a", ["b", "</s>", "a"]),
    ],
)
def test_the_best_score_is_joined_first(text: str, expected: list[str]) -> None:
    own = tokenizer(add_bos_token=False, add_space_prefix=False)
    assert pieces(own, text) == expected
    assert own.decode(own.encode(text), skip_special_tokens=False) == text


def test_llama_s_files_begin_with_a_start_token_and_a_space() -> None:
    own = tokenizer()
    assert pieces(own, "ab") == ["<s>", "▁", "ab"]
    assert own.decode(own.encode("ab")) == "ab"
    assert own.eos_ids == {2}


def test_tokens_that_are_text_are_not_lost_in_answers() -> None:
    own = tokenizer(add_space_prefix=False)
    assert own.decode(own.encode("a  b</s>")) == "a  b"


def test_scores_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ModelLoadError, match="1 scores"):
        tokenizer(scores=[0.0])
