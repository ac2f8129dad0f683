"""How a step's chunks become scans: runs of tokens that end where a state is to be stored.

Decodes go together, one row each. Everything else goes segment by segment, and a segment's shapes are its own: its
bits do not depend on what else is in the step, and a text cut at a checkpoint has the bits of one that went through.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from moonpool_worker.engine.batch import SequenceChunk, StateSlots

#: Tokens of a prompt that are computed as one matrix.
TILE = 64

#: ``(rows, states before them) → states after them``; it writes its output rows itself.
Scan = Callable[[slice, torch.Tensor], torch.Tensor]
Step = Callable[[torch.Tensor | slice, torch.Tensor], torch.Tensor]


@dataclass(slots=True)
class Segment:
    """Rows ``first`` to ``last`` of the step, from the state in block ``source`` to the blocks ``targets``."""

    first: int
    last: int
    source: int
    targets: tuple[int, ...]


@dataclass(slots=True)
class Decodes:
    """One row each: ``rows`` [B] (all of the step's rows: a slice), ``sources`` [B]; state ``which[i]`` is stored to
    block ``targets[i]``, state ``i`` where ``which`` is None."""

    rows: torch.Tensor | slice
    sources: torch.Tensor
    which: torch.Tensor | None
    targets: torch.Tensor


@dataclass(slots=True)
class StatePlan:
    decodes: Decodes | None
    segments: list[Segment]


def plan_states(chunks: Sequence[SequenceChunk], index: int, device: torch.device) -> StatePlan:
    """For state group ``index``. ValueError when a chunk says nothing of its state or its targets do not fit it."""
    segments: list[Segment] = []
    rows: list[int] = []
    sources: list[int] = []
    stores: list[tuple[int, int]] = []
    row = 0
    for chunk in chunks:
        slots = slots_of(chunk, index)
        if len(chunk.token_ids) == 1:
            stores.extend((len(rows), block) for _, block in slots.targets)
            rows.append(row)
            sources.append(slots.source)
        else:
            segments.extend(_segments(row - chunk.start, row, slots))
        row += len(chunk.token_ids)
    decodes = None
    if rows:
        decodes = Decodes(
            rows=slice(0, row) if len(rows) == row else torch.tensor(rows, device=device),
            sources=torch.tensor(sources, device=device),
            which=None if len(stores) == len(rows) else torch.tensor([which for which, _ in stores], device=device),
            targets=torch.tensor([block for _, block in stores], device=device),
        )
    return StatePlan(decodes, segments)


def slots_of(chunk: SequenceChunk, index: int) -> StateSlots:
    """A chunk's slots in state group ``index``; ValueError when there are none or they do not end where it ends."""
    slots = chunk.states[index] if index < len(chunk.states) else None
    if slots is None:
        raise ValueError(f"a chunk says nothing of its state in cache group {index}")
    positions = [position for position, _ in slots.targets]
    if not positions or positions[-1] != chunk.end or positions[0] <= chunk.start or positions != sorted(positions):
        raise ValueError(f"states at {positions} do not belong to a chunk of positions {chunk.start} to {chunk.end}")
    return slots


def _segments(offset: int, first: int, slots: StateSlots) -> list[Segment]:
    """``offset``: what to add to a position to get its row."""
    segments: list[Segment] = []
    source = slots.source
    for position, block in slots.targets:
        if segments and segments[-1].last == position + offset:
            segments[-1].targets += (block,)
            continue
        segments.append(Segment(first, position + offset, source, (block,)))
        first, source = position + offset, block
    return segments


def run(plan: StatePlan, states: torch.Tensor, step: Step, scan: Scan) -> None:
    """All scans of one layer; ``states`` [blocks, *shape]. ``step`` has states [B, *shape], ``scan`` [*shape]."""
    if plan.decodes is not None:
        decodes = plan.decodes
        after = step(decodes.rows, states[decodes.sources])
        states[decodes.targets] = after if decodes.which is None else after[decodes.which]
    for segment in plan.segments:
        after = scan(slice(segment.first, segment.last), states[segment.source])
        for block in segment.targets:
            states[block] = after


def tiles(x: torch.Tensor, size: int) -> torch.Tensor:
    """[L, H, …] → [tiles, H, size, …] in float32, zeros behind the end."""
    rows = x.shape[0]
    count = -(-rows // size)
    padded = torch.zeros(count * size, *x.shape[1:], dtype=torch.float32, device=x.device)
    padded[:rows] = x
    return padded.view(count, size, *x.shape[1:]).transpose(1, 2).contiguous()


def rows_of(tiled: torch.Tensor, rows: int) -> torch.Tensor:
    """The way back: [tiles, H, size, D] → [L, H, D]."""
    return tiled.transpose(1, 2).flatten(0, 1)[:rows]


def tile_size(rows: int) -> int:
    """A short run is padded to the next multiple of 16 only."""
    return min(TILE, -(-rows // 16) * 16)


def decays(total: torch.Tensor) -> torch.Tensor:
    """exp(total_t - total_i) for i ≤ t, 0 above: from sums of logarithms [..., C] to [..., C, C]."""
    size = total.shape[-1]
    above = torch.ones(size, size, dtype=torch.bool, device=total.device).triu_(1)
    # Masked before exp: above the diagonal the difference is positive and may overflow.
    return (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill_(above, float("-inf")).exp_()
