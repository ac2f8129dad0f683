"""Steps over recurrent states, and the recurrences written out token by token in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from moonpool_worker.engine.batch import SequenceChunk, StateSlots

#: Per chunk: start, tokens, source block, (position, block) targets.
Chunk = tuple[int, int, int, list[tuple[int, int]]]

STEPS: dict[str, list[Chunk]] = {
    "one decode in place": [(5, 1, 3, [(6, 3)])],
    "decodes": [(5, 1, 3, [(6, 3)]), (0, 1, 0, [(1, 4)]), (63, 1, 5, [(64, 6), (64, 7)])],
    "short prompt": [(0, 5, 0, [(5, 1)])],
    "prompt of two tiles and a rest": [(0, 150, 0, [(150, 1)])],
    "checkpoints on the way": [(10, 140, 2, [(32, 8), (64, 9), (150, 2)])],
    "the source is the last target": [(16, 33, 2, [(48, 8), (49, 2)])],
    "everything at once": [
        (7, 1, 3, [(8, 3)]),
        (0, 70, 0, [(64, 8), (70, 4)]),
        (9, 1, 5, [(10, 6)]),
        (64, 20, 9, [(80, 10), (84, 11)]),
        (1, 2, 12, [(3, 12)]),
    ],
}

BLOCKS = 14


def chunks_of(step: Sequence[Chunk]) -> list[SequenceChunk]:
    """As the second cache group of two."""
    return [
        SequenceChunk([0] * tokens, start, ((1,), ()), states=(None, StateSlots(source, targets)))
        for start, tokens, source, targets in step
    ]


def states_like(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """[BLOCKS, *shape] with a gap behind each block, as in an arena of several planes; block 0 is zeros."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.Size(shape).numel()
    flat = torch.randn(BLOCKS, size + 24, generator=generator).to(dtype)
    flat[0] = 0
    return flat[:, :size].unflatten(1, shape)


@dataclass(slots=True)
class Inputs:
    """Random inputs of one recurrence, by argument name, and the shape of its state."""

    tensors: dict[str, torch.Tensor]
    state: tuple[int, ...]


def gated_delta_inputs(
    rows: int, *, channels: bool, heads: int = 3, dk: int = 16, dv: int = 32, dtype: torch.dtype = torch.float32
) -> Inputs:
    """Keys that are alike, and decays from hardly any to all in a token: both are hard for a tile."""
    torch.manual_seed(rows)
    unit = torch.nn.functional.normalize
    shape = (rows, heads, dk) if channels else (rows, heads)
    tensors = {
        "q": unit(torch.randn(rows, heads, dk), dim=-1) * dk**-0.5,
        "k": unit(torch.randn(rows, heads, dk) + torch.randn(1, heads, dk), dim=-1),
        "v": torch.randn(rows, heads, dv),
        "g": -torch.exp(torch.randn(shape) * 2 - 1.5),
        "beta": torch.rand(rows, heads),
    }
    return Inputs({n: t if n == "g" else t.to(dtype) for n, t in tensors.items()}, (heads, dk, dv))


def mamba2_inputs(
    rows: int, *, heads: int = 4, groups: int = 2, dv: int = 16, n: int = 32, dtype: torch.dtype = torch.float32
) -> Inputs:
    torch.manual_seed(rows)
    tensors = {
        "x": torch.randn(rows, heads, dv).to(dtype),
        "dt": torch.nn.functional.softplus(torch.randn(rows, heads) * 3),
        "a": -torch.rand(heads) * 4,
        "b": torch.randn(rows, groups, n).to(dtype) * n**-0.5,
        "c": torch.randn(rows, groups, n).to(dtype),
        "d": torch.randn(heads),
    }
    return Inputs(tensors, (heads, dv, n))


def written_out_conv(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, state: torch.Tensor, silu: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """One text: x [L, C] from state [C, W - 1] on."""
    outputs = []
    window = state.double()
    for row in x.double():
        window = torch.cat([window, row.unsqueeze(-1)], dim=-1)
        y = (window * weight.double()).sum(-1) + (0 if bias is None else bias.double())
        outputs.append(torch.nn.functional.silu(y) if silu else y)
        window = window[:, 1:]
    return torch.stack(outputs), window


def written_out_gated_delta(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v, g, beta, state = (t.double() for t in (q, k, v, g, beta, state))
    outputs = []
    for t in range(q.shape[0]):
        decay = g[t].exp()
        state = state * (decay[..., None] if g.dim() == 3 else decay[:, None, None])
        update = beta[t][:, None] * (v[t] - torch.einsum("hk,hkv->hv", k[t], state))
        state = state + torch.einsum("hk,hv->hkv", k[t], update)
        outputs.append(torch.einsum("hk,hkv->hv", q[t], state))
    return torch.stack(outputs), state


def written_out_mamba2(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    x, dt, a, b, c, d, state = (t.double() for t in (x, dt, a, b, c, d, state))
    share = x.shape[1] // b.shape[1]
    outputs = []
    for t in range(x.shape[0]):
        b_t, c_t = b[t].repeat_interleave(share, 0), c[t].repeat_interleave(share, 0)
        state = state * (dt[t] * a).exp()[:, None, None]
        state = state + torch.einsum("hv,hn->hvn", x[t] * dt[t][:, None], b_t)
        outputs.append(torch.einsum("hvn,hn->hv", state, c_t) + d[:, None] * x[t])
    return torch.stack(outputs), state
