"""What one step's attention has to do in one history group, as tables that kernels read.

Queries are cut into tiles, and the positions that a tile looks at into splits (flash-decoding, Dao et al., 2023), so
that one long text keeps the whole device busy. Both cuts depend on the chunk's own length and position alone: what
stands beside a request in a step changes no bit of its result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from moonpool_api.geometry import GroupGeometry

from moonpool_worker.engine.batch import SequenceChunk

#: Splits begin at multiples of it, and so do the kernels' blocks of positions: no larger block may be used.
ALIGNMENT = 128
#: A split that ends all: no text is this long.
_WHOLE = 1 << 30
#: Chunks of up to this many tokens are split as decodes are; longer ones have tiles enough to fill the device.
SHORT_CHUNK = 64
#: Integers of a piece of work and of a reduction, as the kernels read them.
WORK_FIELDS, REDUCTION_FIELDS = 8, 4


@dataclass(frozen=True, slots=True)
class Tiling:
    """How queries and positions are cut: tiles of ``queries`` tokens; splits of ``split`` positions in short chunks."""

    queries: int
    split: int
    decodes: bool


@dataclass(frozen=True, slots=True)
class Work:
    """``pieces`` int32 [n, 8]: table row, first step row, rows, position of the first row, first position to look at,
    end of the positions to look at, slot for the partial result (-1: the result is whole), unused.

    ``reductions`` int32 [m, 4]: first step row, rows, first slot, number of slots, for tiles of several pieces.
    """

    pieces: torch.Tensor
    reductions: torch.Tensor
    slots: int


@dataclass(slots=True)
class StepPlan:
    """``table`` int32 [chunks, blocks]; ``slots`` int64 [T], where this step's rows are stored: block * rows + row."""

    device: torch.device
    window: int | None
    rows: int
    table: torch.Tensor
    slots: torch.Tensor
    starts: np.ndarray
    lengths: np.ndarray
    step_rows: np.ndarray
    _work: dict[Tiling, Work] = field(default_factory=dict)

    def work(self, tiling: Tiling) -> Work:
        """The pieces of the chunks of one token (``decodes``) or of all others. Made once for all layers of a step."""
        if tiling not in self._work:
            self._work[tiling] = self._cut(tiling)
        return self._work[tiling]

    def _cut(self, tiling: Tiling) -> Work:
        chosen = np.flatnonzero((self.lengths == 1) == tiling.decodes)
        lengths, queries = self.lengths[chosen], tiling.queries
        tiles = -(-lengths // queries)
        chunk, number = _expand(tiles)
        first = number * queries
        rows = np.minimum(queries, lengths[chunk] - first)
        position = self.starts[chosen][chunk] + first
        end = position + rows
        begin = np.zeros_like(position)
        if self.window is not None:
            begin = np.maximum(position - self.window + 1, 0) // ALIGNMENT * ALIGNMENT
        split = np.where(lengths[chunk] <= SHORT_CHUNK, tiling.split, _WHOLE)
        first_split = begin // split
        splits = (end - 1) // split - first_split + 1

        tile, number = _expand(splits)
        piece_begin = np.maximum(begin[tile], (first_split[tile] + number) * split[tile])
        piece_end = np.minimum(end[tile], (first_split[tile] + number + 1) * split[tile])
        several = splits > 1
        first_slot = np.cumsum(np.where(several, splits, 0)) - np.where(several, splits, 0)
        slot = np.where(several[tile], first_slot[tile] + number, -1)
        step_row = self.step_rows[chosen][chunk] + first
        pieces = np.zeros((tile.size, WORK_FIELDS), np.int32)
        for column, values in enumerate((chosen[chunk], step_row, rows, position)):
            pieces[:, column] = values[tile]
        pieces[:, 4], pieces[:, 5], pieces[:, 6] = piece_begin, piece_end, slot
        # The longest first: what is left for the end is short.
        pieces = pieces[np.argsort(piece_begin - piece_end, kind="stable")]
        reductions = np.stack([step_row, rows, first_slot, splits], axis=1)[several].astype(np.int32)
        return Work(
            to_device(pieces, self.device), to_device(reductions, self.device), int(np.where(several, splits, 0).sum())
        )


def make_plan(
    chunks: Sequence[SequenceChunk], index: int, group: GroupGeometry, device: torch.device | str
) -> StepPlan:
    """For history group ``index``. ValueError for a group whose rows stand for several tokens."""
    if group.stride != 1:
        raise ValueError(f"group {group.name}: attention over rows of {group.stride} tokens is not paged attention")
    device = torch.device(device)
    rows = group.rows
    starts = np.array([chunk.start for chunk in chunks], np.int64)
    lengths = np.array([len(chunk.token_ids) for chunk in chunks], np.int64)
    blocks = -(-(starts + lengths) // rows)
    table = np.zeros((len(chunks), int(blocks.max(initial=1))), np.int32)
    for number, chunk in enumerate(chunks):
        table[number, : blocks[number]] = chunk.tables[index][: blocks[number]]
    chunk_of, offset = _expand(lengths)
    position = starts[chunk_of] + offset
    slots = table[chunk_of, position // rows].astype(np.int64) * rows + position % rows
    return StepPlan(
        device=device,
        window=group.window,
        rows=rows,
        table=to_device(table, device),
        slots=to_device(slots, device),
        starts=starts,
        lengths=lengths,
        step_rows=np.cumsum(lengths) - lengths,
    )


def _expand(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For counts (2, 1, 3): owners (0, 0, 1, 2, 2, 2) and numbers (0, 1, 0, 0, 1, 2)."""
    owners = np.repeat(np.arange(counts.size), counts)
    return owners, np.arange(owners.size) - np.repeat(np.cumsum(counts) - counts, counts)


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A copy that the host does not wait for."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
