"""L1: the device memory of all cached keys and values."""

from __future__ import annotations

import torch
from moonpool_api.geometry import CacheGeometry

#: Never handed out: padding in block tables points here, and its contents mean nothing.
NULL_BLOCK = 0

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def torch_dtype(geometry: CacheGeometry) -> torch.dtype:
    """The torch dtype of a cached element; ValueError when ``geometry.dtype`` is unknown."""
    try:
        return _DTYPES[geometry.dtype]
    except KeyError:
        raise ValueError(f"cached KV cannot have dtype {geometry.dtype!r}; use one of {sorted(_DTYPES)}") from None


class DeviceArena:
    """Keys and values of ``num_blocks`` blocks, layer-major.

    ``keys`` and ``values`` have shape ``[layers, num_blocks, P, kv_heads, head_dim]``: within a layer, blocks with
    consecutive ids are one contiguous ``[tokens, kv_heads, head_dim]`` view. Block 0 is the null block.

    On a CPU the memory is lazily touched: a page costs nothing until its block is first written. RuntimeError when
    the device has too little memory.
    """

    def __init__(self, geometry: CacheGeometry, num_blocks: int, device: torch.device | str = "cpu") -> None:
        if num_blocks < 2:
            raise ValueError(f"L1 needs the null block and at least one more, got {num_blocks} blocks")
        self.geometry = geometry
        self.num_blocks = num_blocks
        self.device = torch.device(device)
        shape = (
            geometry.layers,
            num_blocks,
            geometry.prefix_granularity,
            geometry.kv_heads,
            geometry.head_dim,
        )
        self.keys = torch.empty(shape, dtype=torch_dtype(geometry), device=self.device)
        self.values = torch.empty(shape, dtype=torch_dtype(geometry), device=self.device)
        # The null block is read by padded rows: garbage may be NaN, and NaN survives a mask that multiplies.
        self.keys[:, NULL_BLOCK].zero_()
        self.values[:, NULL_BLOCK].zero_()

    @staticmethod
    def blocks_in(geometry: CacheGeometry, size: int) -> int:
        """How many blocks, the null block included, fit in ``size`` bytes."""
        return size // geometry.bytes_per_block

    @property
    def nbytes(self) -> int:
        return self.num_blocks * self.geometry.bytes_per_block
