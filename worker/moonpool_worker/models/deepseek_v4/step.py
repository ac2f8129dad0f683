"""What all layers of one forward pass share."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moonpool_worker.engine.batch import SequenceChunk, StepBatch
from moonpool_worker.kernels.compressed_attention import Piece, pieces
from moonpool_worker.kernels.interface import Kernels
from moonpool_worker.kernels.paged_table import PagedTable, Place
from moonpool_worker.models.deepseek_v4.caches import ROWS, tail_of
from moonpool_worker.models.deepseek_v4.compressor import Closing, closing
from moonpool_worker.models.deepseek_v4.config import DeepseekV4Config, Kind
from moonpool_worker.models.deepseek_v4.rotation import angles
from moonpool_worker.models.family import Cache
from moonpool_worker.models.rope import rope_frequencies
from moonpool_worker.models.rows import positions


@dataclass(frozen=True, slots=True)
class Shared:
    """For all layers of one kind: ``pieces`` to attend in, cos and sin [T, rope / 2], where raw rows go, ``tail`` [T],
    and what they complete. The last two are None without compression, ``closing`` also when nothing is complete."""

    pieces: list[Piece]
    cos: torch.Tensor
    sin: torch.Tensor
    tail: Place | None = None
    closing: Closing | None = None


@dataclass(frozen=True, slots=True)
class V4Step:
    """``recent`` [T] is where the rows of the step's tokens go; ``token_ids`` [T]."""

    kernels: Kernels
    cache: Cache
    token_ids: torch.Tensor
    recent: Place
    shared: dict[Kind, Shared]
    _groups: dict[str, int]

    def rows(self, group: str, layer: int) -> torch.Tensor:
        """A layer's plane of a group: [blocks, rows, width]."""
        return self.cache.view(self._groups[group], layer, ROWS)


class StepPlanner:
    def __init__(self, config: DeepseekV4Config, device: torch.device) -> None:
        c = config
        plain, _ = rope_frequencies(c.rope, c.rope_theta, {})
        compressed, factor = rope_frequencies(c.rope, c.compressed_theta, c.rope_scaling)
        self._config, self._device = c, device
        self._plain, self._compressed = (plain.to(device), 1.0), (compressed.to(device), factor)

    def __call__(self, batch: StepBatch, cache: Cache, kernels: Kernels, token_ids: torch.Tensor) -> V4Step:
        chunks, device = batch.chunks, self._device
        tables = {
            group.name: PagedTable(chunks, index, group, device) for index, group in enumerate(cache.geometry.groups)
        }
        where = positions(batch, device)
        lengths = torch.tensor([len(chunk.token_ids) for chunk in chunks], device=device)
        chunk = torch.arange(len(chunks), device=device).repeat_interleave(lengths, output_size=where.shape[0])
        shared = {kind: self._shared(kind, chunks, tables, chunk, where) for kind in set(self._config.kinds)}
        numbers = {group.name: index for index, group in enumerate(cache.geometry.groups)}
        return V4Step(kernels, cache, token_ids, tables["window"].find(chunk, where), shared, numbers)

    def _shared(
        self,
        kind: Kind,
        chunks: list[SequenceChunk],
        tables: dict[str, PagedTable],
        chunk: torch.Tensor,
        where: torch.Tensor,
    ) -> Shared:
        c, recent = self._config, tables["window"]
        if kind == "window":
            return Shared(pieces(chunks, recent, c.window, None, 1, self._device), *angles(where, *self._plain))
        stride, tail, chain = c.strides[kind], tables[tail_of(kind)], tables[kind]
        return Shared(
            pieces(chunks, recent, c.window, chain, stride, self._device),
            *angles(where, *self._compressed),
            tail=tail.find(chunk, where),
            closing=closing(chunks, tail, chain, stride, kind == "csa", *self._compressed),
        )
