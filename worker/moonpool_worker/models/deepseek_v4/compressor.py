"""From the raw rows of a stretch of text to its entry (DeepSeek-V4, 2026, sections 2.3.1 and 2.3.2).

A raw row holds, for each series, what a token adds and how strongly: values, gates. In CSA a token has two of each: for
the entry after its own stretch, and for that of its own, so that an entry is a mean over two stretches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from moonpool_worker.engine.batch import SequenceChunk
from moonpool_worker.kernels.gated_pooling import gated_mean
from moonpool_worker.kernels.interface import Kernels
from moonpool_worker.kernels.paged_table import PagedTable, Place
from moonpool_worker.models.deepseek_v4.config import DeepseekV4Config, Kind
from moonpool_worker.models.deepseek_v4.rotation import angles, rotate_last
from moonpool_worker.weights.tensor_reader import TensorReader


@dataclass(frozen=True, slots=True)
class Closing:
    """The n entries that a step completes: the raw rows ``sources`` [n, tokens], where they go, ``place`` [n], which
    have no stretch before, bool ``first`` [n, 1, 1], and cos and sin [n, rope / 2] of their first tokens."""

    sources: Place
    place: Place
    first: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor


def closing(
    chunks: Sequence[SequenceChunk],
    tail: PagedTable,
    chain: PagedTable,
    stride: int,
    overlap: bool,
    frequencies: torch.Tensor,
    factor: float,
) -> Closing | None:
    """None when no chunk reaches the end of a stretch."""
    found = [
        (number, entry)
        for number, chunk in enumerate(chunks)
        for entry in range(chunk.start // stride, chunk.end // stride)
    ]
    if not found:
        return None
    device = frequencies.device
    chunk, entry = torch.tensor(found, device=device).unbind(1)
    start = entry * stride
    token = start.unsqueeze(1) + torch.arange(-stride if overlap else 0, stride, device=device)
    cos, sin = angles(start, frequencies, factor)
    return Closing(
        sources=tail.find(chunk.unsqueeze(1), token, token >= 0),
        place=chain.find(chunk, entry),
        first=(entry == 0).view(-1, 1, 1),
        cos=cos,
        sin=sin,
    )


class _Series:
    """One mean: rows of ``width``. From the tensors ``prefix`` + ``ape``, the gate's bias by place in the stretch
    [stride, width] (twice as wide with overlap), and ``norm``."""

    def __init__(self, reader: TensorReader, prefix: str, width: int, overlap: bool, eps: float) -> None:
        self._width, self._overlap, self._eps = width, overlap, eps
        self._bias = reader.read(f"{prefix}ape", dtype=torch.float32)
        self._norm = reader.read(f"{prefix}norm.weight", dtype=torch.float32)

    def __call__(self, values: torch.Tensor, gates: torch.Tensor, closing: Closing, kernels: Kernels) -> torch.Tensor:
        """``values``, ``gates`` [n, tokens, width of a raw row] → [n, width]."""
        stride, width = self._bias.shape[0], self._width
        if self._overlap:
            before, own = slice(None, stride), slice(stride, None)
            values = torch.cat([values[:, before, :width], values[:, own, width:]], dim=1)
            earlier = gates[:, before, :width] + self._bias[:, :width]
            earlier = earlier.masked_fill(closing.first, float("-inf"))
            gates = torch.cat([earlier, gates[:, own, width:] + self._bias[:, width:]], dim=1)
        else:
            gates = gates + self._bias
        mean = kernels.rms_norm(gated_mean(values, gates), self._norm, self._eps)
        return rotate_last(mean, closing.cos, closing.sin)


class Compressor:
    """``prefix`` is that of the layer's attention; with CSA the indexer's keys are a second series."""

    def __init__(self, config: DeepseekV4Config, reader: TensorReader, kind: Kind, prefix: str) -> None:
        overlap = kind == "csa"
        self._series = [_Series(reader, f"{prefix}compressor.", config.head_dim, overlap, config.norm_eps)]
        widths = [config.head_dim]
        if overlap:
            self._series.append(
                _Series(reader, f"{prefix}indexer.compressor.", config.index_dim, True, config.norm_eps)
            )
            widths.append(config.index_dim)
        #: Values and gates of each series, in the order of a raw row.
        self._widths = [width * (2 if overlap else 1) for width in widths for _ in range(2)]

    def __call__(self, raw: torch.Tensor, closing: Closing, kernels: Kernels) -> torch.Tensor:
        """``raw`` [n, tokens, width of a raw row] → entries [n, width of an entry]."""
        parts = raw.split(self._widths, dim=-1)
        entries = [
            series(values, gates, closing, kernels)
            for series, values, gates in zip(self._series, parts[0::2], parts[1::2], strict=True)
        ]
        return entries[0] if len(entries) == 1 else torch.cat(entries, dim=-1)


def compressor_shapes(config: DeepseekV4Config, kind: Kind, prefix: str) -> dict[str, tuple[int, ...]]:
    """Tensors of a layer's compression, the projections to raw rows included, in the order of a raw row first."""
    if kind == "window":
        return {}
    overlap = 2 if kind == "csa" else 1
    series = [(f"{prefix}compressor.", config.head_dim)]
    if kind == "csa":
        series.append((f"{prefix}indexer.compressor.", config.index_dim))
    shapes: dict[str, tuple[int, ...]] = {}
    for name, width in series:
        shapes |= {f"{name}{part}.weight": (overlap * width, config.hidden) for part in ("wkv", "wgate")}
    for name, width in series:
        shapes |= {f"{name}ape": (config.strides[kind], overlap * width), f"{name}norm.weight": (width,)}
    return shapes
