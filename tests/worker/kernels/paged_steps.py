"""Steps over paged rows with known results, for every backend: attention written out in float64."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from moonpool_api.geometry import GroupGeometry, PlaneGeometry
from moonpool_worker.engine.batch import SequenceChunk

PAGE, BLOCKS = 4, 400


@dataclass
class Step:
    """``new`` are the rows of this step, to be written by the backend: planes [T, *row]; ``caches`` hold the past."""

    group: GroupGeometry
    chunks: list[SequenceChunk]
    q: torch.Tensor
    new: list[torch.Tensor]
    caches: list[torch.Tensor]
    expected: torch.Tensor


def written_out(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention; the last row of ``q`` [rows, H, D] sees all of ``keys`` [end, K, D] that a window leaves."""
    rows, heads, _ = q.shape
    end, kv_heads, _ = keys.shape
    keys, values = (x.double().repeat_interleave(heads // kv_heads, dim=1) for x in (keys, values))
    scores = torch.einsum("rhd,ehd->hre", q.double(), keys) * scale
    ages = torch.arange(end - rows, end)[:, None] - torch.arange(end)
    scores.masked_fill_((ages < 0) | (ages >= (window or end)), float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(heads, rows, 1)], dim=-1)
    return torch.einsum("hre,ehd->rhd", scores.softmax(-1)[..., :end], values)


def make_step(
    shape: list[tuple[int, int]],
    *,
    rows: list[tuple[int, ...]],
    heads: int,
    dtype: torch.dtype,
    scale: float,
    value_dim: int | None = None,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    scattered: bool = True,
    dense: bool = True,
    seed: int = 0,
    page: int = PAGE,
) -> Step:
    """``shape``: (start, tokens) per chunk; ``rows``: shape of a row of each plane, keys first.

    With one plane, its first ``value_dim`` elements are the value (latent attention). What was never written and what a
    window has passed is NaN, the null block too: none of it may be read. ``dense`` False: blocks lie apart, as in an
    arena whose blocks hold several planes.
    """
    torch.manual_seed(seed)
    planes = tuple(PlaneGeometry(name=str(i), shape=row, dtype="float32") for i, row in enumerate(rows))
    group = GroupGeometry(name="group", block_tokens=page, layers=(0,), planes=planes, window=window)
    caches = []
    for row in rows:
        whole = torch.full((BLOCKS, page * (1 if dense else 2), *row), float("nan"), dtype=dtype)
        caches.append(whole[:, :page])
    free = list(range(1, BLOCKS))
    if scattered:
        random.Random(seed).shuffle(free)
    tokens = sum(count for _, count in shape)
    q = torch.randn(tokens, heads, rows[0][-1]).to(dtype)
    new = [torch.randn(tokens, *row).to(dtype) for row in rows]
    chunks, expected, first = [], [], 0
    for start, count in shape:
        needed = 0 if window is None else max(start - window + 1, 0)
        table = [free.pop(0) if (i + 1) * page > needed else 0 for i in range(-(-(start + count) // page))]
        past = [torch.randn(start, *row).to(dtype) for row in rows]
        for cache, plane in zip(caches, past, strict=True):
            # Blocks are written and kept whole: what a window has passed in its first block is there.
            for position in range(needed // page * page, start):
                cache[table[position // page], position % page] = plane[position]
        mine = slice(first, first + count)
        seen = [torch.cat([old, plane[mine]]) for old, plane in zip(past, new, strict=True)]
        if value_dim is not None:
            seen = [seen[0].unsqueeze(1), seen[0][:, None, :value_dim]]
        expected.append(written_out(q[mine], seen[0], seen[1], scale, window, sinks))
        chunks.append(SequenceChunk([0] * count, start, (table,)))
        first += count
    return Step(group, chunks, q, new, caches, torch.cat(expected))
