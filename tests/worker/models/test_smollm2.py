"""SmolLM2 against transformers' answers, and against itself however it is batched and wherever its KV lies."""

from __future__ import annotations

import random

import pytest
import torch
from moonpool_worker.engine.batch import SequenceChunk, StepBatch

from tests.worker.models.smollm2 import PAGE, RUNS, greedy, model, prefill, runner, tokenizer

pytestmark = pytest.mark.model

BLOCKS = range(1, 20)


@pytest.mark.parametrize("run", RUNS, ids=range(len(RUNS)))
@pytest.mark.parametrize("step", [None, 4], ids=["whole", "chunked"])
def test_greedy_answers_are_transformers(run: dict, step: int | None) -> None:
    on = runner(model("float32"))
    assert greedy(on, run["prompt_ids"], len(run["new_ids"]), BLOCKS, step) == run["new_ids"]


@pytest.mark.parametrize("run", [run for run in RUNS if "first_top5_ids" in run], ids=["0", "1"])
def test_first_logits_are_transformers(run: dict) -> None:
    top = prefill(runner(model("float32")), run["prompt_ids"], BLOCKS).topk(5)
    assert top.indices.tolist() == run["first_top5_ids"]
    assert top.values.tolist() == pytest.approx(run["first_top5_logits"], abs=1e-3)


def test_sequences_of_one_batch_do_not_see_each_other() -> None:
    on = runner(model("float32"))
    tables = [range(1 + 8 * i, 9 + 8 * i) for i in range(len(RUNS))]
    texts = [list(run["prompt_ids"]) for run in RUNS]
    logits = on.forward(StepBatch([SequenceChunk(ids, 0, (table,)) for ids, table in zip(texts, tables, strict=True)]))
    for _ in range(8):
        for ids, token in zip(texts, logits.argmax(-1).tolist(), strict=True):
            ids.append(token)
        chunks = [SequenceChunk(ids[-1:], len(ids) - 1, (t,)) for ids, t in zip(texts, tables, strict=True)]
        logits = on.forward(StepBatch(chunks))
    for run, ids in zip(RUNS, texts, strict=True):
        expected = run["new_ids"][:8]
        assert ids[len(run["prompt_ids"]) :][: len(expected)] == expected


def test_decode_beside_a_prefill_gives_the_same_tokens() -> None:
    on = runner(model("float32"))
    first, second = RUNS[0], RUNS[1]
    ids = [*first["prompt_ids"], *first["new_ids"][:1]]
    prefill(on, first["prompt_ids"], BLOCKS)
    mixed = StepBatch(
        [
            SequenceChunk(ids[-1:], len(ids) - 1, (BLOCKS,)),
            SequenceChunk(second["prompt_ids"][:4], 0, (range(20, 24),), wants_logits=False),
        ]
    )
    assert on.forward(mixed).argmax(-1).tolist() == first["new_ids"][1:2]
    rest = StepBatch([SequenceChunk(second["prompt_ids"][4:], 4, (range(20, 24),))])
    assert on.forward(rest).argmax(-1).tolist() == second["new_ids"][:1]


def test_a_step_without_logits_returns_no_rows() -> None:
    on = runner(model("float32"))
    logits = on.forward(StepBatch([SequenceChunk([1, 2, 3], 0, (BLOCKS,), wants_logits=False)]))
    assert logits.shape == (0, on.model.config.vocab)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_where_the_blocks_lie_changes_no_bit(dtype: str) -> None:
    """Reuse is bit-equal only if a block's place has no influence: prefill with a past, decode, and a mixed batch."""
    random.seed(1)
    ids = [random.randrange(100, 40_000) for _ in range(150)]
    other = [random.randrange(100, 40_000) for _ in range(40)]
    results = []
    scattered = random.sample(range(1, 60), 18)
    for table in (list(range(1, 19)), list(range(30, 48)), scattered):
        on = runner(model(dtype))
        free = [block for block in range(1, 64) if block not in table]
        seen = [prefill(on, ids[:80], table, step=48)]
        batch = [SequenceChunk(ids[80:120], 80, (table,)), SequenceChunk(other, 0, (free[:4],))]
        seen.extend(on.forward(StepBatch(batch)))
        for end in range(121, 124):
            chunks = [SequenceChunk(ids[end - 1 : end], end - 1, (table,)), SequenceChunk([7], 40, (free[:4],))]
            seen.extend(on.forward(StepBatch(chunks)))
        pages = torch.tensor(table[: 120 // PAGE])
        results.append((torch.stack(seen), on.arena.fields(0)[:, pages]))
    for result in results[1:]:
        for value, expected in zip(result, results[0], strict=True):
            assert torch.equal(value, expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_reused_prefix_gives_the_cold_bits(dtype: str) -> None:
    """KV that an earlier request left, copied elsewhere as a tier would, then the same last chunk."""
    random.seed(2)
    ids = [random.randrange(100, 40_000) for _ in range(100)]
    on = runner(model(dtype))
    cold = prefill(on, ids, range(1, 8), step=64)
    moved = [40, 9, 33, 21]
    fields = on.arena.fields(0)
    fields[:, moved] = fields[:, 1:5].clone()
    warm = on.forward(StepBatch([SequenceChunk(ids[64:], 64, ([*moved, 50, 51, 52],))]))[0]
    assert torch.equal(warm, cold)


def test_bfloat16_speaks_sense() -> None:
    on = runner(model("bfloat16"))
    answer = greedy(on, RUNS[2]["prompt_ids"], 7, BLOCKS)
    assert "Tokyo" in tokenizer().decode(answer)
