"""Kernels in plain torch: the CPU backend, and what other backends are tested against.

Attention goes chunk by chunk through SDPA. The query heads of one KV head are folded into SDPA's row dimension, so
that keys and values are never expanded. Where a chunk's blocks are neighbours in the arena, which the block pool
prefers, its keys and values are a view and nothing is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from moonpool_worker.engine.batch import SequenceChunk
from moonpool_worker.kernels.interface import Linear
from moonpool_worker.kernels.packed_linear import PackedLinear, PlainLinear, can_pack
from moonpool_worker.kernels.threads import usable_cpus


@dataclass(slots=True)
class _ChunkPlan:
    first_row: int
    rows: int
    start: int
    end: int
    #: First slot when all blocks are neighbours, else -1 and ``blocks`` says which.
    first_slot: int
    blocks: torch.Tensor | None
    mask: torch.Tensor | None


@dataclass(slots=True)
class _Plan:
    chunks: list[_ChunkPlan]
    slots: torch.Tensor
    #: One chunk of neighbouring blocks: its rows are one slice of the arena.
    only_slot: int


class TorchKernels:
    name = "torch"

    def __init__(self) -> None:
        torch.set_num_threads(usable_cpus())
        self._masks: dict[tuple[int, int, torch.dtype], torch.Tensor] = {}

    def linear(self, weight: torch.Tensor) -> Linear:
        return PackedLinear(weight) if can_pack(weight) else PlainLinear(weight)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, eps)

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

    def plan(self, chunks: Sequence[SequenceChunk], block_size: int, device: torch.device) -> _Plan:
        plans: list[_ChunkPlan] = []
        slots: list[int] = []
        row = 0
        for chunk in chunks:
            rows, end = len(chunk.token_ids), chunk.end
            needed = chunk.block_ids[: -(-end // block_size)]
            first = needed[0]
            neighbours = needed[-1] - first == len(needed) - 1 and all(
                block == first + i for i, block in enumerate(needed)
            )
            for position in range(chunk.start, end):
                slots.append(needed[position // block_size] * block_size + position % block_size)
            plans.append(
                _ChunkPlan(
                    first_row=row,
                    rows=rows,
                    start=chunk.start,
                    end=end,
                    first_slot=first * block_size if neighbours else -1,
                    blocks=None if neighbours else torch.tensor(needed, dtype=torch.long, device=device),
                    mask=None,
                )
            )
            row += rows
        single = len(plans) == 1 and plans[0].first_slot >= 0
        only_slot = plans[0].first_slot + plans[0].start if single else -1
        return _Plan(plans, torch.tensor(slots, dtype=torch.long, device=device), only_slot)

    def write_kv(self, plan: _Plan, cache: torch.Tensor, rows: torch.Tensor) -> None:
        flat = cache.view(-1, *cache.shape[2:])
        if plan.only_slot >= 0:
            flat[plan.only_slot : plan.only_slot + rows.shape[0]] = rows
        else:
            flat.index_copy_(0, plan.slots, rows)

    def attention(self, plan: _Plan, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        tokens, heads, dim = q.shape
        out = torch.empty(tokens, heads * dim, dtype=q.dtype, device=q.device)
        for chunk in plan.chunks:
            rows = slice(chunk.first_row, chunk.first_row + chunk.rows)
            past_keys, past_values = _past(chunk, keys), _past(chunk, values)
            out[rows] = self._attend(chunk, q[rows], past_keys, past_values)
        return out

    def _attend(self, chunk: _ChunkPlan, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        rows, heads, dim = q.shape
        kv_heads = keys.shape[1]
        group = heads // kv_heads
        # [rows, K, G, D] → [1, K, rows * G, D]: the group's heads are rows of their KV head.
        folded = q.view(rows, kv_heads, group, dim).transpose(0, 1).reshape(1, kv_heads, rows * group, dim)
        k, v = keys.transpose(0, 1).unsqueeze(0), values.transpose(0, 1).unsqueeze(0)
        mask = None if rows == 1 else self._mask(rows, chunk.end, group, q.dtype)
        attended = F.scaled_dot_product_attention(folded, k, v, attn_mask=mask)
        return attended.view(kv_heads, rows, group, dim).transpose(0, 1).reshape(rows, heads * dim)

    def _mask(self, rows: int, end: int, group: int, dtype: torch.dtype) -> torch.Tensor:
        """[rows * group, end], 0 where a row may look and -inf where it may not; kept for the step's other layers."""
        key = (rows, end, dtype)
        mask = self._masks.get(key)
        if mask is None:
            allowed = torch.full((rows, end), float("-inf"), dtype=dtype).triu_(end - rows + 1)
            mask = allowed.repeat_interleave(group, dim=0) if group > 1 else allowed
            # Only the current step's shapes: a mask of 512 rows over 8,192 positions is 25 MB.
            if len(self._masks) >= 4:
                self._masks.clear()
            self._masks[key] = mask
        return mask


def _past(chunk: _ChunkPlan, cache: torch.Tensor) -> torch.Tensor:
    """The first ``end`` rows of the chunk's request in one layer: [end, K, D]."""
    if chunk.first_slot >= 0:
        flat = cache.view(-1, *cache.shape[2:])
        return flat[chunk.first_slot : chunk.first_slot + chunk.end]
    assert chunk.blocks is not None
    return cache.index_select(0, chunk.blocks).view(-1, *cache.shape[2:])[: chunk.end]
