"""Paged attention of the Triton backend, in its interpreter, against attention written out."""

from __future__ import annotations

import pytest
import torch
from moonpool_worker.engine.batch import SequenceChunk
from moonpool_worker.kernels.triton.latent_attention import latent_attention
from moonpool_worker.kernels.triton.paged_attention import SHORT_CHUNK_SPLIT, paged_attention
from moonpool_worker.kernels.triton.step_plan import Tiling, make_plan
from moonpool_worker.kernels.triton.write_rows import write_rows

from tests.worker.kernels.paged_steps import Step, make_step

pytestmark = pytest.mark.interpreter

TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3}


def attended(step: Step, scale: float, sinks: torch.Tensor | None = None) -> torch.Tensor:
    plan = make_plan(step.chunks, 0, step.group, "cpu")
    for cache, rows in zip(step.caches, step.new, strict=True):
        write_rows(plan, cache, rows)
    return paged_attention(plan, step.q, step.caches[0], step.caches[1], scale, sinks)


#: heads, KV heads, dimension, (start, tokens) per chunk, window, sinks. Decodes and prompts, with and without a past,
#: one piece and several; a group that is no power of two, one KV head for all, dimensions that are none.
CASES = [
    (4, 2, 64, [(37, 1), (0, 1), (300, 1), (0, 9)], None, False),
    (3, 1, 64, [(290, 1), (129, 50), (5, 2)], None, False),
    (4, 1, 256, [(70, 1), (3, 20)], None, False),
    (2, 2, 80, [(33, 1), (0, 70)], None, False),
    (4, 2, 64, [(300, 1), (5, 1), (290, 30)], 20, False),
    (4, 2, 64, [(300, 1), (0, 1), (10, 5)], None, True),
    (4, 2, 64, [(520, 1), (250, 40)], 300, True),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("heads, kv_heads, dim, shape, window, sunk", CASES, ids=str)
def test_attention(
    heads: int,
    kv_heads: int,
    dim: int,
    shape: list[tuple[int, int]],
    window: int | None,
    sunk: bool,
    dtype: torch.dtype,
) -> None:
    sinks = torch.linspace(-1, 3, heads).to(dtype) if sunk else None
    step = make_step(
        shape, rows=[(kv_heads, dim)] * 2, heads=heads, dtype=dtype, scale=0.2, window=window, sinks=sinks, dense=False
    )
    result = attended(step, 0.2, sinks)
    torch.testing.assert_close(result.double(), step.expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


#: heads, R, Dr, (start, tokens) per chunk, window. More heads than a tile has rows; ranks that are no power of two.
LATENT_CASES = [
    (4, 64, 16, [(37, 1), (0, 1), (300, 1), (0, 9)], None),
    (40, 64, 16, [(20, 1), (5, 3)], None),
    (3, 48, 8, [(70, 1), (20, 30)], None),
    (4, 512, 64, [(20, 1), (0, 20)], None),
    (4, 64, 16, [(300, 1), (290, 30)], 20),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("heads, rank, turned, shape, window", LATENT_CASES, ids=str)
def test_latent_attention(
    heads: int, rank: int, turned: int, shape: list[tuple[int, int]], window: int | None, dtype: torch.dtype
) -> None:
    step = make_step(
        shape, rows=[(rank + turned,)], heads=heads, dtype=dtype, scale=0.05, value_dim=rank, window=window, dense=False
    )
    plan = make_plan(step.chunks, 0, step.group, "cpu")
    write_rows(plan, step.caches[0], step.new[0])
    result = latent_attention(plan, step.q, step.caches[0], rank, 0.05)
    torch.testing.assert_close(result.double(), step.expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_few_tokens_behind_a_long_past_are_split() -> None:
    step = make_step([(2100, 3)], rows=[(1, 32)] * 2, heads=2, dtype=torch.float32, scale=0.2, page=16)
    plan = make_plan(step.chunks, 0, step.group, "cpu")
    assert plan.work(Tiling(16, SHORT_CHUNK_SPLIT, decodes=False)).slots == 2
    torch.testing.assert_close(attended(step, 0.2).double(), step.expected, atol=1e-5, rtol=1e-5)


def longest(step: Step, tokens: int) -> torch.Tensor:
    """What the step's last ``tokens`` rows come to, the rows before them being in the cache already."""
    plan = make_plan(step.chunks, 0, step.group, "cpu")
    for cache, rows in zip(step.caches, step.new, strict=True):
        write_rows(plan, cache, rows)
    chunk = step.chunks[0]
    tail = SequenceChunk([0] * tokens, chunk.end - tokens, chunk.tables)
    plan = make_plan([tail], 0, step.group, "cpu")
    return paged_attention(plan, step.q[-tokens:], step.caches[0], step.caches[1], 0.2)


@pytest.mark.bit_equal
@pytest.mark.parametrize("window", [None, 40])
def test_how_a_prompt_is_cut_changes_no_bit(window: int | None) -> None:
    step = make_step([(0, 300)], rows=[(1, 32)] * 2, heads=2, dtype=torch.float16, scale=0.2, window=window)
    # The window has passed none of these blocks yet: the whole prompt is one chunk.
    whole = longest(step, 300)
    assert torch.equal(whole[-100:], longest(step, 100))
    assert torch.equal(whole[-71:], longest(step, 71))


@pytest.mark.bit_equal
def test_what_stands_beside_a_request_changes_no_bit() -> None:
    shape = [(700, 1), (40, 20), (300, 1)]
    step = make_step(shape, rows=[(1, 32)] * 2, heads=2, dtype=torch.float16, scale=0.2)
    together = attended(step, 0.2)
    row = 0
    for chunk in step.chunks:
        count = len(chunk.token_ids)
        plan = make_plan([chunk], 0, step.group, "cpu")
        alone = paged_attention(plan, step.q[row : row + count], step.caches[0], step.caches[1], 0.2)
        assert torch.equal(alone, together[row : row + count])
        row += count


def test_rows_of_several_tokens_are_refused() -> None:
    step = make_step([(0, 8)], rows=[(2, 32)] * 2, heads=2, dtype=torch.float32, scale=0.3)
    with pytest.raises(ValueError, match="rows of 4 tokens"):
        make_plan(step.chunks, 0, step.group.model_copy(update={"stride": 4}), "cpu")
