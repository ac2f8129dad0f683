"""Causal attention of many rows in bfloat16, as plain products over blocks of rows.

torch's flash kernel reaches a quarter of a CPU's bfloat16 rate where there is no AMX; oneDNN's products reach most of
it. Scores are rounded to bfloat16 between the two products, as in transformers' eager attention.
"""

from __future__ import annotations

import torch

#: Rows per block. oneDNN compiles a kernel for each shape it meets, so blocks begin and end at multiples of it: what is
#: left over before and after goes another way.
BLOCK = 128


def aligned(start: int, end: int) -> tuple[int, int]:
    """The part of ``start`` to ``end`` that is whole blocks; empty (``end``, ``end``) when there is none."""
    first, last = -(-start // BLOCK) * BLOCK, end // BLOCK * BLOCK
    return (first, last) if first < last else (end, end)


def attend_block(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, triangle: torch.Tensor, out: torch.Tensor
) -> None:
    """One block of rows, the last of ``keys``.

    ``q`` [BLOCK, H, D], scaled; ``keys``, ``values`` [end, K, D]; ``triangle`` [BLOCK, BLOCK], -inf above its diagonal;
    writes ``out`` [BLOCK, H, D].
    """
    rows, heads, dim = q.shape
    end, kv_heads, _ = keys.shape
    group = heads // kv_heads
    for head in range(kv_heads):
        mine = slice(head * group, (head + 1) * group)
        folded = q[:, mine].transpose(0, 1).reshape(group * rows, dim)
        scores = torch.mm(folded, keys[:, head].t())
        scores.view(group, rows, end)[..., end - rows :] += triangle
        weights = torch.softmax(scores, dim=-1)
        out[:, mine].copy_(torch.mm(weights, values[:, head]).view(group, rows, dim).transpose(0, 1))
