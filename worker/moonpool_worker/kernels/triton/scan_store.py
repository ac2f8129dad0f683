"""Storing a state that a scan has reached."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def store_states(states, inner, valid, state, store_block, first, last, block_stride):
    """``state`` to the blocks ``store_block[first:last]`` of ``states``, at the offsets ``inner`` of a block."""
    for store in range(first, last):
        target = states + tl.load(store_block + store).to(tl.int64) * block_stride
        tl.store(target + inner, state, mask=valid)
