"""Attention over two histories of one text at once: the rows of its last tokens, and rows that each stand for many.

One KV head, keys being values (DeepSeek-V4, 2026). A row of the second history, an *entry*, is seen by the tokens from
the last one on that it stands for. All of the past comes from the cache through block tables.

In torch the rows are gathered and scores exist as a whole, for a few rows of the step at a time. A kernel for GPUs
would be the paged attention that there is, with a loop over the window's blocks and a second one over the entries'
blocks under one running maximum, sinks included; of chosen entries it would read only those, through a list of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from moonpool_worker.engine.batch import SequenceChunk
from moonpool_worker.kernels.paged_table import PagedTable, Place

#: Rows of a chunk that are attended in one go, and beyond how many entries there are fewer, so that scores stay small.
_ROWS, _ENTRIES = 128, 4096


@dataclass(frozen=True, slots=True)
class Entries:
    """The second history: G texts with M entries at most. ``place`` [G, M]; ``hidden`` bool [G, R, M]."""

    place: Place
    hidden: torch.Tensor


@dataclass(frozen=True, slots=True)
class Piece:
    """G texts with R rows of the step each: a few rows of one chunk, or one row of each of many.

    ``rows`` int64 [G * R]; ``place`` [G, N] of the last tokens' rows; ``hidden`` bool [G, R, N]: what a row may not
    see of them.
    """

    texts: int
    rows: torch.Tensor
    place: Place
    hidden: torch.Tensor
    entries: Entries | None


def pieces(
    chunks: Sequence[SequenceChunk],
    recent: PagedTable,
    window: int,
    chain: PagedTable | None,
    stride: int,
    device: torch.device,
) -> list[Piece]:
    """For layers that look back ``window`` tokens, the current one included, and at all entries of ``chain``, which
    stand for ``stride`` tokens each. How chunks are cut depends on their sizes alone."""
    return [_piece(cut, recent, window, chain, stride, device) for cut in _cut(chunks, stride)]


def attend(
    piece: Piece,
    q: torch.Tensor,
    recent: torch.Tensor,
    entries: torch.Tensor | None,
    entries_hidden: torch.Tensor | None,
    sinks: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """``q`` [G, R, H, D]; ``recent`` is the plane of the last tokens' rows, [blocks, rows, D]; ``entries`` [G, M, D]
    and ``entries_hidden`` bool [G, R, M]; ``sinks`` [H], logits without a value. Returns [G, R, H, D]."""
    texts, rows, heads, dim = q.shape
    keys, hidden = recent[piece.place], piece.hidden
    if entries is not None and entries_hidden is not None:
        keys, hidden = torch.cat([keys, entries], dim=1), torch.cat([hidden, entries_hidden], dim=2)
    scores = torch.bmm((q * scale).view(texts, rows * heads, dim), keys.transpose(1, 2)).float()
    scores = scores.view(texts, rows, heads, -1).masked_fill_(hidden.unsqueeze(2), float("-inf"))
    sink = sinks.float().view(1, 1, heads, 1).expand(texts, rows, heads, 1)
    weights = torch.cat([scores, sink], dim=-1).softmax(-1)[..., :-1].to(q.dtype)
    return torch.bmm(weights.reshape(texts, rows * heads, -1), keys).view(q.shape)


def choose(
    q: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor, hidden: torch.Tensor, count: int
) -> torch.Tensor:
    """The lightning indexer (DeepSeek-V3.2, 2025): which entries each row looks at, as bool [G, R, M], true where not.

    ``q`` [G, R, H, D], ``keys`` [G, M, D], ``weights`` [G, R, H] of the heads; the ``count`` entries with the largest
    sum of weights * relu(q · key) among those that are not ``hidden`` [G, R, M].
    """
    texts, rows, heads, dim = q.shape
    products = torch.bmm(q.float().view(texts, rows * heads, dim), keys.float().transpose(1, 2)).relu_()
    scores = (products.view(texts, rows, heads, -1) * weights.float().unsqueeze(-1)).sum(2)
    best = scores.masked_fill_(hidden, float("-inf")).topk(count, dim=-1).indices
    return hidden | torch.ones_like(hidden).scatter_(2, best, False)


@dataclass(slots=True)
class _Cut:
    """The same number of ``rows`` of several chunks: chunk numbers, first rows in the step, first positions."""

    rows: int
    chunks: list[int]
    first: list[int]
    start: list[int]


def _cut(chunks: Sequence[SequenceChunk], stride: int) -> list[_Cut]:
    """Decodes go together, everything else by a few rows of one chunk."""
    together, alone = _Cut(1, [], [], []), []
    row = 0
    for number, chunk in enumerate(chunks):
        length = len(chunk.token_ids)
        if length == 1:
            together.chunks.append(number)
            together.first.append(row)
            together.start.append(chunk.start)
        else:
            most = max(1, min(_ROWS, _ROWS * _ENTRIES // max(1, chunk.end // stride)))
            for at in range(0, length, most):
                alone.append(_Cut(min(most, length - at), [number], [row + at], [chunk.start + at]))
        row += length
    return [together, *alone] if together.chunks else alone


def _piece(
    cut: _Cut, recent: PagedTable, window: int, chain: PagedTable | None, stride: int, device: torch.device
) -> Piece:
    chunk, first, start = (torch.tensor(v, device=device).unsqueeze(1) for v in (cut.chunks, cut.first, cut.start))
    counted, longest = torch.arange(cut.rows, device=device), max(cut.start)
    at = start + counted
    # The last row's own position is the last; before the first row stands as much as a window reaches back.
    seen = start + torch.arange(-min(window - 1, longest), cut.rows, device=device)
    age = at.unsqueeze(2) - seen.unsqueeze(1)
    hidden = (age < 0) | (age >= window) | (seen < 0).unsqueeze(1)
    place = recent.find(chunk, seen, seen >= 0)
    entries = None
    most = (longest + cut.rows) // stride
    if chain is not None and most:
        entry = torch.arange(most, device=device).unsqueeze(0)
        there = entry < (start + cut.rows) // stride
        later = entry.unsqueeze(1) >= ((at + 1) // stride).unsqueeze(2)
        entries = Entries(chain.find(chunk, entry, there), later)
    return Piece(len(cut.chunks), (first + counted).view(-1), place, hidden, entries)
