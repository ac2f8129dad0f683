"""The real model, loaded once per dtype, and its reference runs (transformers, float32)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch
from moonpool_worker.cache.device_arena import DeviceArena
from moonpool_worker.engine.batch import SequenceChunk, StepBatch
from moonpool_worker.kernels.interface import select_backend
from moonpool_worker.models.dtype import dtype_name
from moonpool_worker.models.families.llama import LlamaModel
from moonpool_worker.models.registry import geometry, load_model
from moonpool_worker.models.runner import ModelRunner
from moonpool_worker.tokenizer.tokenizer import Tokenizer
from moonpool_worker.weights.checkpoint import Checkpoint
from moonpool_worker.weights.open import open_checkpoint

PAGE = 16
RUNS = json.loads((Path(__file__).with_name("smollm2-135m-instruct.json")).read_text())["runs"]


@contextmanager
def checkpoint(source: str | Path = "smollm2") -> Iterator[Checkpoint]:
    opened = open_checkpoint(source)
    try:
        yield opened
    finally:
        opened.close()


@cache
def tokenizer() -> Tokenizer:
    with checkpoint() as opened:
        return opened.tokenizer()


@cache
def model(dtype: str) -> LlamaModel:
    with checkpoint() as opened:
        loaded = load_model(opened, dtype, select_backend("torch"))
    assert isinstance(loaded, LlamaModel)
    return loaded


def runner(of: LlamaModel, blocks: int = 64) -> ModelRunner:
    return ModelRunner(of, DeviceArena(geometry(of.config, dtype_name(of.dtype), PAGE), blocks))


def prefill(on: ModelRunner, ids: Sequence[int], blocks: Sequence[int], step: int | None = None) -> torch.Tensor:
    """Logits of the last token, [vocab], computed in chunks of ``step`` tokens."""
    step = step or len(ids)
    for start in range(0, len(ids), step):
        chunk = ids[start : start + step]
        logits = on.forward(StepBatch([SequenceChunk(chunk, start, (blocks,), start + len(chunk) == len(ids))]))
    return logits[0]


def greedy(
    on: ModelRunner, prompt: Sequence[int], count: int, blocks: Sequence[int], step: int | None = None
) -> list[int]:
    """``count`` likeliest tokens after ``prompt``."""
    ids = list(prompt)
    logits = prefill(on, ids, blocks, step)
    while True:
        ids.append(int(logits.argmax()))
        if len(ids) == len(prompt) + count:
            return ids[len(prompt) :]
        logits = on.forward(StepBatch([SequenceChunk(ids[-1:], len(ids) - 1, (blocks,))]))[0]
