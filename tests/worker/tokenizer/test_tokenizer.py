from __future__ import annotations

import pytest
from moonpool_worker.tokenizer.chat_template import ChatTemplateError
from moonpool_worker.tokenizer.tokenizer import Tokenizer

from tests.worker.models.smollm2 import RUNS, tokenizer

pytestmark = pytest.mark.model

TEXTS = [
    "Hello, world! 12345 and 3.14",
    "  leading and   inner spaces\n\n\ttabs",
    "naïve café — “quotes” … 你好，世界 🙂👩‍👩‍👧 𝔘𝔫𝔦",
    "def f(x):\n    return x**2  # don't\r\n",
    "",
]


def as_ids(run: dict) -> list[int]:
    own = tokenizer()
    text = own.apply_chat_template(run["chat"]) if "chat" in run else run["prompt"]
    return own.encode(text)


@pytest.mark.parametrize("run", RUNS, ids=range(len(RUNS)))
def test_prompts_are_tokenised_as_transformers_does(run: dict) -> None:
    assert as_ids(run) == run["prompt_ids"]
    assert tokenizer().decode(run["new_ids"], skip_special_tokens=False) == run["text"]


@pytest.mark.parametrize("text", TEXTS)
def test_decoding_gives_the_text_back(text: str) -> None:
    own = tokenizer()
    assert own.decode(own.encode(text)) == text


@pytest.mark.parametrize("text", TEXTS)
def test_a_stream_adds_up_to_the_text_without_broken_characters(text: str) -> None:
    own = tokenizer()
    stream = own.stream_decoder()
    pieces = [stream.step(token) for token in own.encode(text)]
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) == text


def test_digits_stand_alone() -> None:
    own = tokenizer()
    assert [own.token_text(token) for token in own.encode("2026")] == ["2", "0", "2", "6"]


def test_the_end_of_a_turn_ends_the_answer() -> None:
    own = tokenizer()
    end = own.encode("<|im_end|>")
    assert len(end) == 1
    assert set(end) <= own.eos_ids
    assert own.decode(end) == ""


def test_a_chat_without_a_system_message_gets_the_models_own() -> None:
    text = tokenizer().apply_chat_template([{"role": "user", "content": "Hi"}])
    assert text.startswith("<|im_start|>system\n")
    assert text.endswith("<|im_start|>assistant\n")
    own_words = tokenizer().apply_chat_template([{"role": "system", "content": "Be brief."}], False)
    assert own_words == "<|im_start|>system\nBe brief.<|im_end|>\n"


def test_messages_that_the_template_cannot_use_are_refused() -> None:
    with pytest.raises(ChatTemplateError):
        tokenizer().apply_chat_template([{"role": "user"}, {"role": "user", "content": None}])
    bare = Tokenizer(tokenizer().backend, eos_ids=[2])
    with pytest.raises(ChatTemplateError, match="no chat template"):
        bare.apply_chat_template([])


@pytest.mark.parametrize("text", TEXTS)
def test_a_stream_that_ends_anywhere_adds_up_to_what_was_decoded(text: str) -> None:
    own = tokenizer()
    tokens = own.encode(text)
    for end in range(len(tokens) + 1):
        stream = own.stream_decoder()
        pieces = [stream.step(token) for token in tokens[:end]]
        assert not any("\ufffd" in piece for piece in pieces)
        assert "".join(pieces) + stream.flush() == own.decode(tokens[:end])
        assert stream.flush() == ""
