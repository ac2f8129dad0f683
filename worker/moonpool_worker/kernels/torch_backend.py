"""Kernels in plain torch: the CPU backend, and what other backends are tested against.

Attention picks its way by shape alone, never by where blocks lie, so that equal steps give equal bits. Short decodes go
together; everything else goes chunk by chunk, in which the query heads of one KV head are rows of one matrix, so that
keys and values are never expanded. Where a chunk's blocks are neighbours in the arena, which the block pool prefers,
its keys and values are a view and nothing is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from moonpool_api.geometry import GroupGeometry

from moonpool_worker.engine.batch import SequenceChunk
from moonpool_worker.kernels.blocked_attention import BLOCK, aligned, attend_block
from moonpool_worker.kernels.interface import Linear
from moonpool_worker.kernels.packed_linear import PackedLinear, PlainLinear, can_pack
from moonpool_worker.kernels.threads import usable_cpus
from moonpool_worker.kernels.torch_scans import TorchScans

#: Decodes with no more positions than this are gathered and attended in one call: a copy is cheaper than a call.
_SHORT = 384


@dataclass(slots=True)
class _Past:
    """Rows ``row`` to ``row + rows`` of the step, whose last sees ``end`` positions."""

    row: int
    rows: int
    end: int
    #: First slot when all blocks are neighbours, else -1 and ``blocks`` says which.
    first_slot: int
    blocks: torch.Tensor | None


@dataclass(slots=True)
class _Together:
    """Decodes of short sequences: their step rows, arena slots [sequences * longest], and which of these are behind
    the sequence's end [sequences, longest]."""

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
class _Plan:
    pasts: list[_Past]
    together: _Together | None
    slots: torch.Tensor
    #: One chunk of neighbouring blocks: its rows are one slice of the arena.
    only_slot: int


class TorchKernels(TorchScans):
    name = "torch"

    def __init__(self) -> None:
        torch.set_num_threads(usable_cpus())
        self._masks: dict[tuple[int, int, int], torch.Tensor] = {}

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        return PackedLinear(weight, bias) if can_pack(weight) else PlainLinear(weight, bias)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        # As F.rms_norm, to the bit; that one takes three times as long for the rows of a prefill.
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(eps))
        return (wide * scale).mul_(weight).to(x.dtype)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = residual.add_(x)
        return self.rms_norm(total, weight, eps), total

    def rope(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        half = x.shape[-1] // 2
        out = torch.empty_like(x)
        first, second = x[..., :half], x[..., half:]
        torch.mul(first, cos, out=out[..., :half]).addcmul_(second, sin, value=-1)
        torch.mul(second, cos, out=out[..., half:]).addcmul_(first, sin)
        return out

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def plan(self, chunks: Sequence[SequenceChunk], index: int, group: GroupGeometry, device: torch.device) -> _Plan:
        if group.window is not None:
            raise NotImplementedError("sliding windows")
        block_size = group.rows
        self._masks.clear()
        short = {i for i, chunk in enumerate(chunks) if len(chunk.token_ids) == 1 and chunk.end <= _SHORT}
        if len(short) == 1:
            short.clear()
        pasts: list[_Past] = []
        slots: list[int] = []
        rows: list[int] = []
        row = 0
        for number, chunk in enumerate(chunks):
            blocks = list(chunk.tables[index][: -(-chunk.end // block_size)])
            for position in range(chunk.start, chunk.end):
                slots.append(blocks[position // block_size] * block_size + position % block_size)
            if number in short:
                rows.append(row)
            else:
                pasts.append(_past(row, chunk, blocks, block_size))
            row += len(chunk.token_ids)
        together = _together([chunks[i] for i in sorted(short)], index, rows, block_size) if short else None
        only_slot = slots[0] if len(chunks) == 1 and pasts and pasts[0].first_slot >= 0 else -1
        return _Plan(pasts, together, torch.tensor(slots, device=device), only_slot)

    def write_rows(self, plan: _Plan, cache: torch.Tensor, rows: torch.Tensor) -> None:
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
        plan: _Plan,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        scale: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if scale is not None or sinks is not None:
            raise NotImplementedError("scale and sinks")
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if plan.together is not None:
            _attend_together(plan.together, q, keys, values, out)
        for past in plan.pasts:
            rows = slice(past.row, past.row + past.rows)
            self._attend(past, q[rows], _rows_of(past, keys), _rows_of(past, values), out[rows])
        return out.view(q.shape[0], -1)

    def _attend(
        self, past: _Past, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, out: torch.Tensor
    ) -> None:
        """One chunk: whole blocks of rows by themselves in bfloat16, the rest through SDPA."""
        start, end = past.end - past.rows, past.end
        first, last = aligned(start, end) if q.dtype == torch.bfloat16 else (end, end)
        self._attend_rows(q, keys, values, out, start, first, start)
        if first < last:
            triangle = self._mask(BLOCK, BLOCK, 1, q.dtype)
            scaled = q[first - start : last - start] * q.shape[-1] ** -0.5
            for upto in range(first + BLOCK, last + 1, BLOCK):
                mine = slice(upto - BLOCK - first, upto - first)
                target = out[upto - BLOCK - start : upto - start]
                attend_block(scaled[mine], keys[:upto], values[:upto], triangle, target)
            self._attend_rows(q, keys, values, out, last, end, start)

    def _attend_rows(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        out: torch.Tensor,
        first: int,
        last: int,
        start: int,
    ) -> None:
        """Positions ``first`` to ``last`` of a chunk that begins at ``start``, through SDPA."""
        rows = last - first
        if rows <= 0:
            return
        mine = slice(first - start, last - start)
        _, heads, dim = q.shape
        kv_heads = keys.shape[1]
        group = heads // kv_heads
        # [rows, K, G, D] → [1, K, rows * G, D]: the group's heads are rows of their KV head.
        folded = q[mine].view(rows, kv_heads, group, dim).transpose(0, 1).reshape(1, kv_heads, rows * group, dim)
        k, v = keys[:last].transpose(0, 1).unsqueeze(0), values[:last].transpose(0, 1).unsqueeze(0)
        mask = None if rows == 1 else self._mask(rows, last, group, q.dtype)
        attended = F.scaled_dot_product_attention(folded, k, v, attn_mask=mask)
        out[mine].view(rows, kv_heads, group, dim).copy_(attended.view(kv_heads, rows, group, dim).transpose(0, 1))

    def _mask(self, rows: int, end: int, group: int, dtype: torch.dtype) -> torch.Tensor:
        """[rows * group, end], 0 where a row may look and -inf where it may not; kept for the step's other layers."""
        key = (rows, end, group)
        mask = self._masks.get(key)
        if mask is None:
            allowed = torch.full((rows, end), float("-inf"), dtype=dtype).triu_(end - rows + 1)
            mask = self._masks[key] = allowed.repeat_interleave(group, dim=0) if group > 1 else allowed
        return mask


def _past(row: int, chunk: SequenceChunk, blocks: list[int], block_size: int) -> _Past:
    first = blocks[0]
    neighbours = blocks == list(range(first, first + len(blocks)))
    return _Past(
        row=row,
        rows=len(chunk.token_ids),
        end=chunk.end,
        first_slot=first * block_size if neighbours else -1,
        blocks=None if neighbours else torch.tensor(blocks),
    )


def _is_dense(cache: torch.Tensor) -> bool:
    """Whether blocks lie side by side, so that rows can be numbered through."""
    return cache.stride(0) == cache.shape[1] * cache.stride(1)


def _rows_of(past: _Past, cache: torch.Tensor) -> torch.Tensor:
    """The first ``end`` rows of the chunk's request in one layer: [end, K, D]."""
    size = cache.shape[1]
    if past.blocks is None and _is_dense(cache):
        flat = cache.view(-1, *cache.shape[2:])
        return flat[past.first_slot : past.first_slot + past.end]
    if past.blocks is None:
        first = past.first_slot // size
        gathered = cache[first : first + -(-past.end // size)]
    else:
        gathered = cache.index_select(0, past.blocks)
    return gathered.reshape(-1, *cache.shape[2:])[: past.end]


def _together(chunks: list[SequenceChunk], index: int, rows: list[int], block_size: int) -> _Together:
    tables = [list(chunk.tables[index][: -(-chunk.end // block_size)]) for chunk in chunks]
    most = max(map(len, tables))
    blocks = torch.tensor([table + table[:1] * (most - len(table)) for table in tables])
    slots = (blocks.unsqueeze(2) * block_size + torch.arange(block_size)).view(len(chunks), -1)
    ends = torch.tensor([chunk.end for chunk in chunks]).unsqueeze(1)
    hidden = torch.arange(slots.shape[1]) >= ends
    # Behind its end a sequence sees its own first row again, which is finite, and the mask hides it: memory that was
    # never written may hold NaN, which no mask hides.
    slots = torch.where(hidden, slots[:, :1], slots)
    return _Together(torch.tensor(rows), slots.view(-1), hidden)


def _attend_together(
    plan: _Together, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, out: torch.Tensor
) -> None:
    sequences = plan.rows.shape[0]
    _, heads, dim = q.shape
    size, kv_heads = keys.shape[1:3]
    everything = sequences == q.shape[0]
    mine = q if everything else q.index_select(0, plan.rows)
    folded = mine.reshape(sequences, kv_heads, heads // kv_heads, dim)

    def gathered(cache: torch.Tensor) -> torch.Tensor:
        if _is_dense(cache):
            rows = cache.view(-1, kv_heads, dim).index_select(0, plan.slots)
        else:
            rows = cache[plan.slots // size, plan.slots % size]
        return rows.view(sequences, -1, kv_heads, dim).transpose(1, 2)

    attended = F.scaled_dot_product_attention(folded, gathered(keys), gathered(values), attn_mask=plan.mask(q.dtype))
    if everything:
        out.copy_(attended.reshape(sequences, heads, dim))
    else:
        out.index_copy_(0, plan.rows, attended.reshape(sequences, heads, dim))
