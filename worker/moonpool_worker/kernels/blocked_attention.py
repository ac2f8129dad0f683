"""Causal attention of a block of rows, as plain products.

torch's flash kernel reaches a quarter of a CPU's bfloat16 rate where there is no AMX; oneDNN's products reach most of
it. Scores are rounded to the inputs' type between the two products, as in transformers' eager attention.
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
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    sinks: torch.Tensor | None = None,
) -> None:
    """``q`` [rows, H, D], whose last row sees the last of ``keys`` [positions, K, D], ``values`` [positions, K, Dv].

    ``mask`` [rows, width], added to the scores of the last ``width`` positions; ``sinks`` [H], logits without a value;
    writes ``out`` [rows, H, Dv].
    """
    rows, heads, dim = q.shape
    positions, kv_heads, _ = keys.shape
    group = heads // kv_heads
    scaled = q * scale
    for head in range(kv_heads):
        mine = slice(head * group, (head + 1) * group)
        folded = scaled[:, mine].transpose(0, 1).reshape(group * rows, dim)
        scores = torch.mm(folded, keys[:, head].t())
        scores.view(group, rows, positions)[..., positions - mask.shape[1] :] += mask
        if sinks is not None:
            column = sinks[mine].to(scores.dtype).repeat_interleave(rows).unsqueeze(1)
            scores = torch.cat([scores, column], dim=1)
        weights = torch.softmax(scores, dim=-1)[:, :positions]
        out[:, mine].copy_(torch.mm(weights, values[:, head]).view(group, rows, -1).transpose(0, 1))
