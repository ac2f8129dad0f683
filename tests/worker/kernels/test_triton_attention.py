"""Paged attention of the Triton backend, in its interpreter, against attention written out."""

from __future__ import annotations

import pytest
import torch
from moonpool_worker.kernels.triton.paged_attention import paged_attention
from moonpool_worker.kernels.triton.step_plan import make_plan
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
    heads: int, kv_heads: int, dim: int, shape: list[tuple[int, int]], window: int | None, sunk: bool, dtype: torch.dtype
) -> None:
    sinks = torch.linspace(-1, 3, heads).to(dtype) if sunk else None
    step = make_step(
        shape, rows=[(kv_heads, dim)] * 2, heads=heads, dtype=dtype, scale=0.2, window=window, sinks=sinks, dense=False
    )
    result = attended(step, 0.2, sinks)
    torch.testing.assert_close(result.double(), step.expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
