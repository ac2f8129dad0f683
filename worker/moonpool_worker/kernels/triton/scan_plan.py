"""A step's chunks as tables for the scan kernels: tiles of rows, and where states are read and stored.

A tile is at most 64 rows of one chunk and ends where a state is to be stored, so a chunk that is cut at a checkpoint
has the tiles, and the bits, of one that was computed in two steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from moonpool_worker.engine.batch import SequenceChunk, StateSlots
from moonpool_worker.kernels.scans.segments import TILE, slots_of


@dataclass(slots=True)
class ScanPart:
    """Some of a step's chunks (sequences), int32 tables on the device.

    Tile i has ``tile_rows[i]`` rows from ``tile_first[i]`` on and belongs to ``tile_sequence[i]``; after it the state
    is stored to the blocks ``store_block[tile_stores[i] : tile_stores[i + 1]]``. Sequence s has the tiles
    ``sequence_tiles[s]`` to ``sequence_tiles[s + 1]``, begins at row ``sequence_first[s]`` and with the state in block
    ``source[s]``. ``store_end`` [stores]: the row behind the last one that a stored state has seen.
    """

    sequences: int
    tiles: int
    tile_first: torch.Tensor
    tile_rows: torch.Tensor
    tile_sequence: torch.Tensor
    tile_stores: torch.Tensor
    sequence_tiles: torch.Tensor
    sequence_first: torch.Tensor
    source: torch.Tensor
    store_block: torch.Tensor
    store_end: torch.Tensor


@dataclass(slots=True)
class ScanPlan:
    """``decodes``: chunks of one token; ``prompts``: the others."""

    decodes: ScanPart | None
    prompts: ScanPart | None


@dataclass(slots=True)
class _Tables:
    tile_first: list[int] = field(default_factory=list)
    tile_rows: list[int] = field(default_factory=list)
    tile_sequence: list[int] = field(default_factory=list)
    tile_stores: list[int] = field(default_factory=lambda: [0])
    sequence_tiles: list[int] = field(default_factory=lambda: [0])
    sequence_first: list[int] = field(default_factory=list)
    source: list[int] = field(default_factory=list)
    store_block: list[int] = field(default_factory=list)
    store_end: list[int] = field(default_factory=list)

    def add(self, first: int, start: int, slots: StateSlots) -> None:
        """A chunk whose first row is ``first`` and first position is ``start``."""
        sequence = len(self.source)
        self.source.append(slots.source)
        self.sequence_first.append(first)
        row = first
        for position, block in slots.targets:
            end = first + position - start
            while row < end:
                rows = min(TILE, end - row)
                self.tile_first.append(row)
                self.tile_rows.append(rows)
                self.tile_sequence.append(sequence)
                self.tile_stores.append(len(self.store_block))
                row += rows
            self.store_block.append(block)
            self.store_end.append(end)
            self.tile_stores[-1] = len(self.store_block)
        self.sequence_tiles.append(len(self.tile_first))

    def on(self, device: torch.device) -> ScanPart | None:
        """One copy to the device for all tables."""
        if not self.source:
            return None
        lists = [getattr(self, name) for name in self.__slots__]
        flat: list[int] = []
        begins = []
        for numbers in lists:
            begins.append(len(flat))
            # Kernels are compiled anew for another alignment of a pointer.
            flat += numbers + [0] * (-len(numbers) % 4)
        host = torch.tensor(flat, dtype=torch.int32)
        if device.type == "cuda":
            host = host.pin_memory()
        table = host.to(device, non_blocking=True)
        views = [table[begin : begin + len(numbers)] for begin, numbers in zip(begins, lists, strict=True)]
        return ScanPart(len(self.source), len(self.tile_first), *views)


def plan_scans(chunks: Sequence[SequenceChunk], index: int, device: torch.device) -> ScanPlan:
    """For state group ``index`` of the chunks' states. ValueError when a chunk's states do not fit it."""
    decodes, prompts = _Tables(), _Tables()
    row = 0
    for chunk in chunks:
        tables = decodes if len(chunk.token_ids) == 1 else prompts
        tables.add(row, chunk.start, slots_of(chunk, index))
        row += len(chunk.token_ids)
    return ScanPlan(decodes.on(device), prompts.on(device))


def by_rows(x: torch.Tensor) -> torch.Tensor:
    """``x`` [T, …] with each row contiguous, whatever lies between rows; a copy only where that is not so."""
    inner = x[0] if x.shape[0] else x
    return x if inner.is_contiguous() else x.contiguous()
