"""From rows of texts to where they lie in a cache group, for all chunks of a step at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from moonpool_api.geometry import GroupGeometry

from moonpool_worker.cache.device_arena import NULL_BLOCK
from moonpool_worker.engine.batch import SequenceChunk

#: ``(blocks, rows of them)``, int64 of any one shape [...]. ``plane[place]`` is [..., *row], read or assigned to.
Place = tuple[torch.Tensor, torch.Tensor]


class PagedTable:
    """The block tables of history group ``index``. A text's row ``i`` stands for its tokens ``i * stride`` to
    ``(i + 1) * stride - 1``."""

    def __init__(self, chunks: Sequence[SequenceChunk], index: int, group: GroupGeometry, device: torch.device) -> None:
        self._rows = group.rows
        # What a window has passed is left out: over a long text that is nearly all.
        passed = [
            0 if group.window is None else max(0, (chunk.start - group.window + 1) // group.block_tokens)
            for chunk in chunks
        ]
        tables = [list(chunk.tables[index][first:]) for chunk, first in zip(chunks, passed, strict=True)]
        most = max(map(len, tables))
        padded = [table + [NULL_BLOCK] * (most - len(table)) for table in tables]
        self._blocks = torch.tensor(padded, device=device)
        self._first = torch.tensor(passed, device=device)

    def find(self, chunk: torch.Tensor, row: torch.Tensor, there: torch.Tensor | None = None) -> Place:
        """Row ``row`` of the text of chunk ``chunk``, int64, of shapes that broadcast to [...].

        Where ``there`` is false the place is in the null block, whose rows are zeros: memory that was never written
        may hold NaN, which no mask hides.
        """
        block, inside = row // self._rows - self._first[chunk], row % self._rows
        if there is None:
            return self._blocks[chunk, block], inside
        found = self._blocks[chunk, torch.where(there, block, 0)]
        return torch.where(there, found, NULL_BLOCK), torch.where(there, inside, 0)
