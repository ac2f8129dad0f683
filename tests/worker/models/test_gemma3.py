"""Gemma 3 270M with its real weights beside transformers' answers, and beyond its window."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
import torch
from moonpool_worker.kernels.interface import select_backend
from moonpool_worker.models.registry import load_model
from moonpool_worker.tokenizer.tokenizer import Tokenizer

from tests.worker.models.family_case import Case, Text
from tests.worker.models.smollm2 import checkpoint

pytestmark = pytest.mark.model

RUNS = json.loads((Path(__file__).with_name("gemma3-270m.json")).read_text())["runs"]


@cache
def tokenizer() -> Tokenizer:
    with checkpoint("gemma3") as opened:
        return opened.tokenizer()


@cache
def case(dtype: str, backend: str = "torch") -> Case:
    with checkpoint("gemma3") as opened:
        return Case(load_model(opened, dtype, select_backend(backend)))


def greedy(on: Case, prompt: list[int], count: int, step: int) -> list[int]:
    """``count`` likeliest tokens; the prompt in chunks of ``step``."""
    text = Text(on)
    while text.length < len(prompt):
        logits = text.feed(prompt[text.length : text.length + step])
    ids = [int(logits.argmax())]
    while len(ids) < count:
        ids.append(int(text.feed(ids[-1:]).argmax()))
    return ids


@pytest.mark.parametrize("run", RUNS, ids=range(len(RUNS)))
@pytest.mark.parametrize(("step", "count"), [(64, 24), (5, 10)], ids=["whole", "chunked"])
def test_greedy_answers_are_transformers(run: dict, step: int, count: int) -> None:
    assert greedy(case("float32"), run["prompt_ids"], count, step) == run["new_ids"][:count]


@pytest.mark.parametrize("run", RUNS, ids=range(len(RUNS)))
def test_first_logits_are_transformers(run: dict) -> None:
    top = Text(case("float32")).feed(run["prompt_ids"]).topk(5)
    assert top.indices.tolist() == run["first_top5_ids"]
    assert top.values.tolist() == pytest.approx(run["first_top5_logits"], abs=1e-3)


@pytest.mark.parametrize("run", RUNS, ids=range(len(RUNS)))
def test_prompts_are_tokenised_as_transformers_does(run: dict) -> None:
    assert tokenizer().encode(run["prompt"]) == run["prompt_ids"]
    assert tokenizer().decode(run["new_ids"], skip_special_tokens=False) == run["text"]


@pytest.mark.parametrize(
    "text",
    [
        "  leading and   inner spaces\n\n\n\ttabs",
        "naïve café — “quotes” … 你好，世界 🙂👩‍👩‍👧 𝔘𝔫𝔦",
        "<table> is one token, \x01 is bytes",
        "",
    ],
)
def test_decoding_gives_the_text_back_whole_and_streamed(text: str) -> None:
    ids = tokenizer().encode(text)
    assert tokenizer().decode(ids) == text
    stream = tokenizer().stream_decoder()
    assert "".join(stream.step(token) for token in ids) + stream.flush() == text


def test_spaces_and_line_ends_in_a_row_are_one_token() -> None:
    own = tokenizer()
    texts = [own.token_text(token) for token in own.encode("a   b\n\n\nc")[1:]]
    assert texts == ["a", "   ", "b", "\n\n\n", "c"]


@pytest.mark.parametrize("backend", ["torch", "auto"])
def test_bfloat16_speaks_sense(backend: str) -> None:
    answer = greedy(case("bfloat16", backend), RUNS[0]["prompt_ids"], 12, 64)
    assert "the capital of" in tokenizer().decode(answer)


@pytest.mark.bit_equal
def test_a_hit_beyond_the_window_has_the_cold_bits() -> None:
    """1,200 tokens are more than two windows: most of the window group's table is holes."""
    on = case("bfloat16")
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(1000, 200_000, (1200,), generator=generator).tolist()
    cold = Text(on)
    for start in range(0, 1152, 576):
        cold.feed(ids[start : start + 576])
    hit = cold.hit(1152)
    hit.tables[1][: (1152 - 512 + 1) // on.page] = [0] * ((1152 - 512 + 1) // on.page)
    expected = [cold.feed(ids[1152:1190]), *(cold.feed([token]) for token in ids[1190:])]
    found = [hit.feed(ids[1152:1190]), *(hit.feed([token]) for token in ids[1190:])]
    assert cold.tables[1].count(0) == hit.tables[1].count(0) == (1199 - 512 + 1) // on.page
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
