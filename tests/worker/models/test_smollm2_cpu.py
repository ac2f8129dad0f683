"""SmolLM2 on the C++ backend, in bfloat16 over the file's own blocks: transformers' float32 answers, and no bit that
depends on how a text was computed."""

from __future__ import annotations

import itertools
import random
from functools import cache

import pytest
import torch
from moonpool_worker.engine.batch import SequenceChunk, StepBatch
from moonpool_worker.kernels.cpu.decoder import FusedDecoder
from moonpool_worker.models.families.llama import LlamaModel
from moonpool_worker.models.registry import load_model
from moonpool_worker.models.runner import ModelRunner

from tests.worker.kernels.cpu_case import cpu_kernels
from tests.worker.models.smollm2 import RUNS, checkpoint, greedy, prefill, runner

pytestmark = pytest.mark.model
BLOCKS = range(1, 20)


@cache
def model(fused: bool = True) -> LlamaModel:
    kernels = cpu_kernels()
    if not fused:
        kernels.decoder = lambda parts: None  # type: ignore[method-assign]
    with checkpoint() as opened:
        loaded = load_model(opened, "bfloat16", kernels)
    assert isinstance(loaded, LlamaModel)
    assert isinstance(loaded._whole, FusedDecoder) == fused
    return loaded


def words(count: int, seed: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(100, 40_000) for _ in range(count)]


@pytest.mark.parametrize("run", RUNS, ids=range(len(RUNS)))
@pytest.mark.parametrize("step", [None, 4], ids=["whole", "chunked"])
def test_greedy_answers_are_transformers(run: dict, step: int | None) -> None:
    assert greedy(runner(model()), run["prompt_ids"], len(run["new_ids"]), BLOCKS, step) == run["new_ids"]


@pytest.mark.parametrize("run", [run for run in RUNS if "first_top5_ids" in run], ids=["0", "1"])
@pytest.mark.parametrize("fused", [True, False])
def test_first_logits_are_near_transformers(run: dict, fused: bool) -> None:
    logits = prefill(runner(model(fused)), run["prompt_ids"], BLOCKS)
    assert int(logits.argmax()) == run["first_top5_ids"][0]
    assert logits[run["first_top5_ids"]].tolist() == pytest.approx(run["first_top5_logits"], abs=0.2)


@pytest.mark.bit_equal
def test_how_a_text_is_cut_into_chunks_changes_no_bit() -> None:
    """Whole, in uneven chunks beside another text, and a token at a time at the end."""
    ids, other = words(330, 1), words(40, 2)
    whole = prefill(runner(model()), ids, range(1, 22))
    for cuts in ([0, 7, 300, 330], [0, 256, *range(300, 331)]):
        on = runner(model())
        for first, last in itertools.pairwise(cuts):
            mine = SequenceChunk(ids[first:last], first, (range(1, 22),))
            beside = SequenceChunk(other, 0, (range(30, 33),))
            logits = on.forward(StepBatch([beside, mine]))[1]
        assert torch.equal(logits, whole)


@pytest.mark.bit_equal
def test_a_decode_does_not_depend_on_its_batch() -> None:
    texts = [words(20 + 31 * number, number) for number in range(11)]
    on = runner(model(), 256)
    tables = [list(range(1 + 22 * i, 23 + 22 * i)) for i in range(11)]
    together = on.forward(
        StepBatch([SequenceChunk(ids, 0, (table,)) for ids, table in zip(texts, tables, strict=True)])
    )
    for count in (1, 2, 8, 11):
        chunks = [
            SequenceChunk(ids[-1:], len(ids) - 1, (table,))
            for ids, table in zip(texts[:count], tables[:count], strict=True)
        ]
        assert torch.equal(on.forward(StepBatch(chunks)), together[:count])


@pytest.mark.bit_equal
def test_where_the_blocks_lie_changes_no_bit() -> None:
    """KV that an earlier request left, copied elsewhere as a tier would, then the same last chunk."""
    ids, on = words(100, 3), runner(model())
    cold = prefill(on, ids, range(1, 8), step=64)
    moved, fields = [40, 9, 33, 21], on.arena.fields(0)
    fields[:, moved] = fields[:, 1:5].clone()
    warm = on.forward(StepBatch([SequenceChunk(ids[64:], 64, ([*moved, 50, 51, 52],))]))[0]
    assert torch.equal(warm, cold)


def test_a_step_without_logits_returns_no_rows() -> None:
    on: ModelRunner = runner(model())
    logits = on.forward(StepBatch([SequenceChunk([1, 2, 3], 0, (BLOCKS,), wants_logits=False)]))
    assert logits.shape == (0, on.model.config.vocab)


def test_what_is_out_of_range_is_refused() -> None:
    on = runner(model())
    with pytest.raises(IndexError, match="table of 1 entries"):
        on.forward(StepBatch([SequenceChunk([1] * 17, 0, ([1],))]))
    for token in (-1, on.model.config.vocab):
        with pytest.raises(IndexError, match="token ids"):
            on.forward(StepBatch([SequenceChunk([1, token], 0, (BLOCKS,))]))
    with pytest.raises(IndexError, match="8192 positions"):
        on.forward(StepBatch([SequenceChunk([1], 8192, ([1] * 513,))]))
