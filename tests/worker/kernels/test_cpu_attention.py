"""Attention of the C++ backend against attention written out, and against itself however a text is cut into chunks."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
import torch
from moonpool_api.geometry import GroupGeometry, PlaneGeometry
from moonpool_worker.engine.batch import SequenceChunk
from moonpool_worker.kernels.cpu.backend import CpuKernels

from tests.worker.kernels.cpu_case import cpu_kernels

#: (start, rows) per chunk.
STEPS = [
    [(0, 1)],
    [(37, 1), (0, 3), (700, 1)],
    [(0, 130), (5, 1)],
    [(250, 77), (1, 1), (513, 2)],
]


def written_out(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    window: int | None,
    scale: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """In float64; the last row of ``q`` [rows, H, D] is at the last of ``keys`` [end, K, D]."""
    rows, heads, dim = q.shape
    end, kv_heads, _ = keys.shape
    keys, values = (x.double().repeat_interleave(heads // kv_heads, dim=1) for x in (keys, values))
    scores = torch.einsum("rhd,ehd->hre", q.double(), keys) * scale
    age = torch.arange(end - rows, end)[:, None] - torch.arange(end)
    scores.masked_fill_((age < 0) | (age >= (window or end)), float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(heads, rows, 1)], dim=-1)
    return torch.einsum("hre,ehd->rhd", scores.softmax(-1)[..., :end], values).reshape(rows, heads * dim)


class Texts:
    """Keys and values of some texts, scattered over a cache whose unwritten rows are NaN."""

    def __init__(self, ends: Sequence[int], kv_heads: int, dim: int, block: int, strided: bool) -> None:
        blocks = sum(-(-end // block) for end in ends) + 1
        planes = 2 if strided else 1
        memory = torch.full((blocks, planes * 2, block, kv_heads, dim), float("nan"), dtype=torch.bfloat16)
        self.keys, self.values = memory[:, 0], memory[:, planes]
        self.block = block
        free = list(range(1, blocks))
        random.Random(1).shuffle(free)
        self.tables = [[free.pop() for _ in range(-(-end // block))] for end in ends]
        self.rows = [tuple(torch.randn(end, kv_heads, dim).bfloat16() for _ in range(2)) for end in ends]

    def fill(self, text: int, end: int) -> None:
        for position in range(end):
            block, row = self.tables[text][position // self.block], position % self.block
            self.keys[block, row], self.values[block, row] = (rows[position] for rows in self.rows[text])


def run(
    kernels: CpuKernels,
    texts: Texts,
    parts: Sequence[tuple[int, int, int]],
    q: torch.Tensor,
    window: int | None,
    **more: object,
) -> torch.Tensor:
    """``parts``: (text, start, rows). Writes the chunks' keys and values, then attends."""
    kv_heads, dim = texts.keys.shape[2:]
    planes = tuple(PlaneGeometry(name=name, shape=(kv_heads, dim), dtype="bfloat16") for name in "kv")
    group = GroupGeometry(name="g", block_tokens=texts.block, layers=(0,), planes=planes, window=window)
    chunks = [SequenceChunk([0] * rows, start, (texts.tables[text],)) for text, start, rows in parts]
    plan = kernels.plan(chunks, 0, group, torch.device("cpu"))
    for plane, cache in enumerate((texts.keys, texts.values)):
        new = torch.cat([texts.rows[text][plane][start : start + rows] for text, start, rows in parts])
        kernels.write_rows(plan, cache, new)
    return kernels.attention(plan, q, texts.keys, texts.values, **more)  # type: ignore[arg-type]


def check(
    step: list[tuple[int, int]], kv_heads: int, group: int, dim: int, block: int, window: int | None, special: bool
) -> None:
    torch.manual_seed(0)
    kernels, heads = cpu_kernels(), kv_heads * group
    texts = Texts([start + rows for start, rows in step], kv_heads, dim, block, strided=special)
    q = torch.randn(sum(rows for _, rows in step), heads, dim).bfloat16()
    scale = 0.3 * dim**-0.5 if special else None
    sinks = torch.randn(heads) if special else None
    for text, (start, _) in enumerate(step):
        texts.fill(text, start)
    parts = [(text, start, rows) for text, (start, rows) in enumerate(step)]
    found = run(kernels, texts, parts, q, window, scale=scale, sinks=sinks)
    row = 0
    for text, (start, rows) in enumerate(step):
        keys, values = (r[: start + rows] for r in texts.rows[text])
        expected = written_out(q[row : row + rows], keys, values, window, scale or dim**-0.5, sinks)
        torch.testing.assert_close(found[row : row + rows].double(), expected, atol=2e-2, rtol=2e-2)
        row += rows


@pytest.mark.parametrize("step", STEPS, ids=str)
@pytest.mark.parametrize("dim", [32, 64, 80, 96, 128, 256])
def test_head_dimensions(step: list[tuple[int, int]], dim: int) -> None:
    check(step, kv_heads=2, group=3, dim=dim, block=16, window=None, special=False)


@pytest.mark.parametrize("group", range(1, 9))
@pytest.mark.parametrize("kv_heads", [1, 3])
def test_groups_of_heads(kv_heads: int, group: int) -> None:
    for step in STEPS:
        check(step, kv_heads, group, dim=64, block=16, window=None, special=False)


@pytest.mark.parametrize("block", [8, 16, 48, 128])
@pytest.mark.parametrize("window", [None, 1, 5, 64, 300])
def test_blocks_windows_scales_and_sinks(block: int, window: int | None) -> None:
    for step, special in itertools.product(STEPS, (False, True)):
        check(step, kv_heads=2, group=2, dim=64, block=block, window=window, special=special)


@pytest.mark.bit_equal
@pytest.mark.parametrize("window", [None, 100])
def test_how_a_text_is_cut_into_chunks_changes_no_bit(window: int | None) -> None:
    """All at once; in chunks; a token at a time; and with other texts beside it."""
    torch.manual_seed(0)
    kernels, end, other = cpu_kernels(), 700, 90
    q = torch.randn(end, 6, 64).bfloat16()
    beside = torch.randn(other, 6, 64).bfloat16()
    base = Texts([end, other], 2, 64, 16, strided=False)
    whole = run(kernels, base, [(0, 0, end)], q, window)
    for cuts in ([0, 500, 501, 503, end], [0, 64, 256, 600, end], [*range(0, 600, 100), *range(600, end + 1)]):
        texts = Texts([end, other], 2, 64, 16, strided=False)
        texts.rows = base.rows
        found = []
        for first, last in itertools.pairwise(cuts):
            parts = [(0, first, last - first), (1, 0, other)]
            found.append(run(kernels, texts, parts, torch.cat([q[first:last], beside]), window)[: last - first])
        assert torch.equal(torch.cat(found), whole)
