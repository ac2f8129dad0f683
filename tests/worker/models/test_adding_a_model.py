"""The worked example of docs/adding-a-model.md: put where families live, it is found and serves."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from moonpool_worker.engine.delivery import OutputStream
from moonpool_worker.engine.engine import Engine
from moonpool_worker.engine.loading import Loaded, load
from moonpool_worker.engine.request import Request
from moonpool_worker.engine.scheduler import Scheduler
from moonpool_worker.engine.text import StoppableText
from moonpool_worker.models import families as package
from moonpool_worker.models.registry import families
from moonpool_worker.sampling.params import SamplingParams
from moonpool_worker.sampling.sampler import Sampler
from moonpool_worker.settings import Settings
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

DOCS = Path(__file__).parents[3] / "docs/adding-a-model.md"
PAGE, WINDOW, LAYERS, HEAD, HIDDEN, VOCAB = 4, 6, 4, 8, 32, 50
PROMPT = [(7 * place + 3) % VOCAB for place in range(5 * PAGE + 2)]
NEW_TOKENS = 9


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A checkpoint of the family, which exists for as long as the test runs."""
    (source,) = (code for code in re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL) if "FAMILY =" in code)
    (tmp_path / "families").mkdir()
    (tmp_path / "families/tandem.py").write_text(source)
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path / "families")])
    families.cache_clear()
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    config = {
        "model_type": "tandem",
        "num_hidden_layers": LAYERS,
        "hidden_size": HIDDEN,
        "head_dim": HEAD,
        "vocab_size": VOCAB,
        "sliding_window": WINDOW,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
    }
    (checkpoint / "config.json").write_text(json.dumps(config))
    Tokenizer(WordLevel({str(number): number for number in range(VOCAB)}, "0")).save(str(checkpoint / "tokenizer.json"))
    save_file(weights(), checkpoint / "model.safetensors")
    yield checkpoint
    families.cache_clear()


def weights() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(5)
    shapes = {"embed.weight": (VOCAB, HIDDEN), "norm.weight": (HIDDEN,)}
    for number in range(LAYERS):
        shapes[f"layers.{number}.norm.weight"] = (HIDDEN,)
        shapes[f"layers.{number}.qkv.weight"] = (3 * HEAD, HIDDEN)
        shapes[f"layers.{number}.out.weight"] = (HIDDEN, HEAD)
    return {
        name: torch.randn(shape, generator=draw) * (shape[-1] ** -0.5 if len(shape) > 1 else 1)
        for name, shape in shapes.items()
    }


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


def reference(tokens: list[int]) -> int:
    """The next token, by a dense pass over the whole text: no cache, no blocks, no batch."""
    w = weights()
    x = w["embed.weight"][tokens]
    places = torch.arange(len(tokens))
    behind = places[:, None] - places[None, :]
    for number in range(LAYERS):
        q, k, v = (norm(x, w[f"layers.{number}.norm.weight"]) @ w[f"layers.{number}.qkv.weight"].T).split(HEAD, dim=-1)
        hidden = (behind < 0) | ((behind >= WINDOW) if number % 2 else False)
        scores = (q @ k.T / math.sqrt(HEAD)).masked_fill(hidden, -math.inf)
        x = x + scores.softmax(-1) @ v @ w[f"layers.{number}.out.weight"].T
    return int((norm(x[-1], w["norm.weight"]) @ w["embed.weight"].T).argmax())


def expected() -> list[int]:
    tokens = list(PROMPT)
    for _ in range(NEW_TOKENS):
        tokens.append(reference(tokens))
    return tokens[len(PROMPT) :]


async def serve(engine: Engine, loaded: Loaded) -> Request:
    stream = OutputStream()
    text = StoppableText(loaded.tokenizer.stream_decoder())
    request = Request("id", list(PROMPT), NEW_TOKENS, stream, text, SamplingParams(temperature=0))
    engine.submit([request])
    while (await asyncio.wait_for(stream.get(), 60))[1].finish_reason is None:
        pass
    return request


@pytest.mark.family
async def test_the_example_is_found_serves_and_hits(folder: Path) -> None:
    assert "tandem" in families()
    settings = Settings(str(folder), dtype="float32", attention_backend="torch", prefix_granularity=PAGE,
                        max_batch_tokens=16, max_running=2, l1_bytes=1 << 20, l2_bytes=1 << 20)  # fmt: skip
    loaded = load(settings, lambda what, done, total: None)
    assert [group.name for group in loaded.inputs.geometry.groups] == ["full", "sliding"]
    scheduler = Scheduler(loaded.cache, settings.max_batch_tokens, settings.max_running)
    engine = Engine(loaded.runner, loaded.cache, Sampler(), scheduler, asyncio.get_running_loop())
    engine.start()
    try:
        answers = [await serve(engine, loaded) for _ in range(2)]
    finally:
        engine.stop()
    wanted = expected()
    assert len(set(wanted)) > 3, "a text that says always the same would prove little"
    for answer in answers:
        assert answer.token_ids[len(PROMPT) :] == wanted
    assert [answer.cached.total for answer in answers if answer.cached] == [0, 5 * PAGE]
