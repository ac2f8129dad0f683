"""Attention of the torch backend, as a mixin: full, sliding, with sinks, and over latent rows.

Attention picks its way by shape alone, never by where blocks lie, so that equal steps give equal bits. Short decodes go
together; everything else goes chunk by chunk, in which the query heads of one KV head are rows of one matrix, so that
keys and values are never expanded. Where a chunk's blocks are neighbours in the arena, which the block pool prefers,
its keys and values are a view and nothing is copied.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from moonpool_api.geometry import GroupGeometry

from moonpool_worker.engine.batch import SequenceChunk
from moonpool_worker.kernels.blocked_attention import BLOCK, aligned, attend_block

#: Decodes that see no more positions than this are gathered and attended in one call: a copy is cheaper than a call.
_SHORT = 384


@dataclass(slots=True)
class _Past:
    """Rows ``row`` to ``row + rows`` of the step, whose last sees the positions ``begin`` to ``end``.

    ``begin`` is the first position of a block: 0, or as far as a sliding window lets the first row look.
    """

    row: int
    rows: int
    begin: int
    end: int
    #: The first block when all are neighbours, else -1 and ``blocks`` says which.
    first_block: int
    blocks: torch.Tensor | None

    @property
    def start(self) -> int:
        return self.end - self.rows


@dataclass(slots=True)
class _Together:
    """Decodes that see little: their step rows, arena slots [sequences * longest], and which of these a sequence does
    not see [sequences, longest]."""

    rows: torch.Tensor
    slots: torch.Tensor
    hidden: torch.Tensor
    _mask: torch.Tensor | None = None

    def mask(self, dtype: torch.dtype) -> torch.Tensor:
        """[sequences, 1, 1, longest] of 0 and -inf; kept for the step's other layers."""
        if self._mask is None:
            zeros = torch.zeros(self.hidden.shape, dtype=dtype)
            self._mask = zeros.masked_fill_(self.hidden, float("-inf"))[:, None, None]
        return self._mask


@dataclass(slots=True)
class AttentionStep:
    """The plan of one step for one group."""

    pasts: list[_Past]
    together: _Together | None
    slots: torch.Tensor
    #: One chunk of neighbouring blocks: its rows are one slice of the arena.
    only_slot: int
    window: int | None
    _masks: dict[tuple[int, int, int], torch.Tensor] = field(default_factory=dict)

    def mask(self, rows: int, positions: int, group: int, dtype: torch.dtype) -> torch.Tensor:
        """[rows * group, positions], 0 where a row may look and -inf where it may not; the last row sees the last
        position. Kept for the step's other layers."""
        key = (rows, positions, group)
        mask = self._masks.get(key)
        if mask is None:
            ages = torch.arange(positions - rows, positions)[:, None] - torch.arange(positions)
            hidden = ages < 0 if self.window is None else (ages < 0) | (ages >= self.window)
            mask = torch.zeros(rows, positions, dtype=dtype).masked_fill_(hidden, float("-inf"))
            mask = self._masks[key] = mask.repeat_interleave(group, dim=0) if group > 1 else mask
        return mask


class TorchAttention:
    """The attention half of :class:`moonpool_worker.kernels.interface.Kernels`, which says what each of these does."""

    def plan(
        self, chunks: Sequence[SequenceChunk], index: int, group: GroupGeometry, device: torch.device
    ) -> AttentionStep:
        if group.stride != 1:
            raise ValueError(f"group {group.name}: attention over rows of {group.stride} tokens is not paged attention")
        size, window = group.rows, group.window
        short = {
            number
            for number, chunk in enumerate(chunks)
            if len(chunk.token_ids) == 1 and min(chunk.end, window or chunk.end) <= _SHORT
        }
        if len(short) == 1:
            short.clear()
        pasts: list[_Past] = []
        slots: list[int] = []
        rows: list[int] = []
        row = 0
        for number, chunk in enumerate(chunks):
            table = chunk.tables[index]
            slots += [table[at // size] * size + at % size for at in range(chunk.start, chunk.end)]
            if number in short:
                rows.append(row)
            else:
                pasts.append(_past(row, chunk, table, size, window))
            row += len(chunk.token_ids)
        together = _together([chunks[i] for i in sorted(short)], index, rows, size, window) if short else None
        only_slot = slots[0] if len(chunks) == 1 and pasts and pasts[0].blocks is None else -1
        return AttentionStep(pasts, together, torch.tensor(slots, device=device), only_slot, window)

    def write_rows(self, plan: AttentionStep, cache: torch.Tensor, rows: torch.Tensor) -> None:
        if not _is_dense(cache):
            size = cache.shape[1]
            cache[plan.slots // size, plan.slots % size] = rows
            return
        flat = cache.view(-1, *cache.shape[2:])
        if plan.only_slot >= 0:
            flat[plan.only_slot : plan.only_slot + rows.shape[0]] = rows
        else:
            flat.index_copy_(0, plan.slots, rows)

    def attention(
        self,
        plan: AttentionStep,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        scale: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        if plan.together is not None:
            seen_keys, seen_values = _gather(plan.together, keys), _gather(plan.together, values)
            _attend_together(plan.together, q, seen_keys, seen_values, out, scale, sinks)
        for past in plan.pasts:
            mine = slice(past.row, past.row + past.rows)
            _attend(plan, past, q[mine], _rows_of(past, keys), _rows_of(past, values), out[mine], scale, sinks)
        return out.view(q.shape[0], -1)

    def latent_attention(
        self, plan: AttentionStep, q: torch.Tensor, latent: torch.Tensor, value_dim: int, *, scale: float
    ) -> torch.Tensor:
        out = torch.empty((*q.shape[:2], value_dim), dtype=q.dtype, device=q.device)
        latent = latent.unsqueeze(2)
        if plan.together is not None:
            rows = _gather(plan.together, latent)
            _attend_together(plan.together, q, rows, rows[..., :value_dim], out, scale, None)
        for past in plan.pasts:
            mine, rows = slice(past.row, past.row + past.rows), _rows_of(past, latent)
            _attend(plan, past, q[mine], rows, rows[..., :value_dim], out[mine], scale, None)
        return out


def _past(row: int, chunk: SequenceChunk, table: Sequence[int], size: int, window: int | None) -> _Past:
    first_seen = 0 if window is None else max(chunk.start - window + 1, 0)
    begin = first_seen // size
    blocks = list(table[begin : -(-chunk.end // size)])
    neighbours = blocks == list(range(blocks[0], blocks[0] + len(blocks)))
    return _Past(
        row=row,
        rows=len(chunk.token_ids),
        begin=begin * size,
        end=chunk.end,
        first_block=blocks[0] if neighbours else -1,
        blocks=None if neighbours else torch.tensor(blocks),
    )


def _is_dense(cache: torch.Tensor) -> bool:
    """Whether blocks lie side by side, so that rows can be numbered through."""
    return cache.stride(0) == cache.shape[1] * cache.stride(1)


def _rows_of(past: _Past, cache: torch.Tensor) -> torch.Tensor:
    """The rows ``begin`` to ``end`` of the chunk's request in one layer: [end - begin, K, D]."""
    size, count = cache.shape[1], past.end - past.begin
    if past.blocks is not None:
        rows = cache.index_select(0, past.blocks)
    else:
        rows = cache[past.first_block : past.first_block + -(-count // size)]
    return rows.reshape(-1, *cache.shape[2:])[:count]


def _pieces(start: int, end: int, whole_blocks: bool) -> Iterator[tuple[int, int]]:
    """The positions ``start`` to ``end``: whole blocks by themselves, and what is left before and after them."""
    first, last = aligned(start, end) if whole_blocks else (end, end)
    bounds = [start, *range(first, last, BLOCK), last, end]
    return ((a, b) for a, b in itertools.pairwise(bounds) if a < b)


def _attend(
    plan: AttentionStep,
    past: _Past,
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    sinks: torch.Tensor | None,
) -> None:
    """One chunk: ``q`` [rows, H, D], ``keys`` [end - begin, K, D], ``values`` [end - begin, K, Dv] → ``out``
    [rows, H, Dv]. In bfloat16, behind a window and with sinks, whole blocks of rows go by themselves."""
    window, bfloat = plan.window, q.dtype == torch.bfloat16
    group = q.shape[1] // keys.shape[1]
    for a, b in _pieces(past.start, past.end, bfloat or window is not None or sinks is not None):
        whole = b - a == BLOCK
        first = 0
        if window is not None:
            first = max(a - window + 1, 0)
            if whole:
                # Whole blocks look back by whole blocks: oneDNN then meets few shapes. The mask hides what is too old.
                first = max(past.begin, first // BLOCK * BLOCK)
        mine, seen = slice(a - past.start, b - past.start), slice(first - past.begin, b - past.begin)
        piece = (q[mine], keys[seen], values[seen], out[mine])
        positions = b - first
        if sinks is not None or (whole and bfloat):
            # Without a window only a block's last positions are hidden from some of its rows.
            width = positions if window is not None else b - a
            attend_block(*piece, plan.mask(b - a, width, 1, q.dtype), scale, sinks)
        else:
            _attend_rows(*piece, None if b - a == 1 else plan.mask(b - a, positions, group, q.dtype), scale)


def _attend_rows(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
) -> None:
    """Through SDPA. ``mask`` [rows * G, positions]: the group's heads are rows of their KV head."""
    rows, heads, dim = q.shape
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    # [rows, K, G, D] → [1, K, rows * G, D].
    folded = q.view(rows, kv_heads, group, dim).transpose(0, 1).reshape(1, kv_heads, rows * group, dim)
    k, v = keys.transpose(0, 1).unsqueeze(0), values.transpose(0, 1).unsqueeze(0)
    attended = F.scaled_dot_product_attention(folded, k, v, attn_mask=mask, scale=scale)
    out.view(rows, kv_heads, group, -1).copy_(attended.view(kv_heads, rows, group, -1).transpose(0, 1))


def _together(chunks: list[SequenceChunk], index: int, rows: list[int], size: int, window: int | None) -> _Together:
    begins = [0 if window is None else max(chunk.end - window, 0) // size for chunk in chunks]
    tables = [
        list(chunk.tables[index][begin : -(-chunk.end // size)]) for chunk, begin in zip(chunks, begins, strict=True)
    ]
    most = max(map(len, tables))
    blocks = torch.tensor([table + table[-1:] * (most - len(table)) for table in tables])
    slots = (blocks.unsqueeze(2) * size + torch.arange(size)).view(len(chunks), -1)
    ends = torch.tensor([chunk.end for chunk in chunks]).unsqueeze(1)
    at = torch.arange(slots.shape[1]) + torch.tensor(begins).unsqueeze(1) * size
    hidden = at >= ends if window is None else (at >= ends) | (at < ends - window)
    # Where it may not look a sequence sees its own last row again, which is finite, and the mask hides it: memory that
    # was never written may hold NaN, which no mask hides.
    last = slots.gather(1, (ends - 1) - at[:, :1])
    return _Together(torch.tensor(rows), torch.where(hidden, last, slots).view(-1), hidden)


def _gather(plan: _Together, cache: torch.Tensor) -> torch.Tensor:
    """The rows that the sequences see: [sequences, K, longest, D]."""
    size, kv_heads, dim = cache.shape[1:]
    if _is_dense(cache):
        rows = cache.view(-1, kv_heads, dim).index_select(0, plan.slots)
    else:
        rows = cache[plan.slots // size, plan.slots % size]
    return rows.view(plan.rows.shape[0], -1, kv_heads, dim).transpose(1, 2)


def _attend_together(
    plan: _Together,
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    sinks: torch.Tensor | None,
) -> None:
    sequences = plan.rows.shape[0]
    _, heads, dim = q.shape
    kv_heads = keys.shape[1]
    everything = sequences == q.shape[0]
    mine = q if everything else q.index_select(0, plan.rows)
    folded = mine.reshape(sequences, kv_heads, heads // kv_heads, dim)
    mask = plan.mask(q.dtype)
    if sinks is None:
        attended = F.scaled_dot_product_attention(folded, keys, values, attn_mask=mask, scale=scale)
    else:
        scores = (folded * scale) @ keys.transpose(2, 3) + mask
        sink = sinks.to(q.dtype).view(1, kv_heads, -1, 1).expand(sequences, -1, -1, 1)
        attended = torch.cat([scores, sink], dim=-1).softmax(-1)[..., :-1] @ values
    if everything:
        out.copy_(attended.reshape(out.shape))
    else:
        out.index_copy_(0, plan.rows, attended.reshape(sequences, heads, -1))
