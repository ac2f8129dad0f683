"""A step's chunks as the C structures that the library reads."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from moonpool_worker.engine.batch import SequenceChunk
from moonpool_worker.kernels.cpu import structures


class StepChunks:
    """``address`` of the array of chunks; keep this object while a call uses it.

    ``end``: the highest position, plus one. IndexError when a block table does not cover its chunk: the library would
    read past it.
    """

    def __init__(self, chunks: Sequence[SequenceChunk], group: int, block_rows: int) -> None:
        self.count = len(chunks)
        self._structures = (structures.Chunk * self.count)()
        self._tables: list[array[int]] = []
        runs = []
        row = 0
        for structure, chunk in zip(self._structures, chunks, strict=True):
            tokens, start = len(chunk.token_ids), chunk.start
            needed = -(-(start + tokens) // block_rows)
            table = array("i", chunk.tables[group][:needed])
            if len(table) < needed:
                raise IndexError(f"a block table of {len(table)} entries for {start + tokens} tokens")
            self._tables.append(table)
            structure.row, structure.count, structure.start = row, tokens, start
            structure.table = table.buffer_info()[0]
            runs.append(range(start, start + tokens))
            row += tokens
        self.end = max((run.stop for run in runs), default=0)
        self._runs = runs
        self._block_rows = block_rows
        self._slots: tuple[np.ndarray, np.ndarray] | None = None

    @property
    def address(self) -> int:
        import ctypes

        return ctypes.addressof(self._structures)

    def positions(self) -> array[int]:
        """Absolute position of every token of the step."""
        flat = array("i")
        for run in self._runs:
            flat.extend(run)
        return flat

    def slots(self) -> tuple[np.ndarray, np.ndarray]:
        """Block and row within it of every token, int32 [tokens] each; made once."""
        if self._slots is None:
            positions = np.frombuffer(self.positions(), dtype=np.int32)
            entries = positions // self._block_rows
            blocks = np.empty_like(positions)
            row = 0
            for table, run in zip(self._tables, self._runs, strict=True):
                mine = slice(row, row + len(run))
                blocks[mine] = np.frombuffer(table, dtype=np.int32)[entries[mine]]
                row += len(run)
            self._slots = blocks, (positions % self._block_rows).astype(np.int32)
        return self._slots
