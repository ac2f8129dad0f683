"""The block copy at the sizes of a real model, compiled for GPUs that are not here."""

from __future__ import annotations

from collections.abc import Callable

import torch
from moonpool_api.geometry import full_attention
from moonpool_worker.cache.device_arena import DeviceArena
from moonpool_worker.kernels.triton.block_copy import BlockCopy, Move

MOVES = [Move(0, block, block << 20) for block in range(1, 9)]


def _copy() -> BlockCopy:
    geometry = full_attention(layers=32, kv_heads=8, head_dim=128, dtype="bfloat16", prefix_granularity=64)
    host = torch.empty(1 << 24, dtype=torch.uint8, device="meta")
    return BlockCopy(DeviceArena(geometry, 64, device="meta"), host, [1])


def _load() -> None:
    copy = _copy()
    copy.wait(copy.load(MOVES), 5)


CASES: dict[str, Callable[[], object]] = {
    "block copy, to host": lambda: _copy().store(MOVES),
    "block copy, to device": _load,
}
