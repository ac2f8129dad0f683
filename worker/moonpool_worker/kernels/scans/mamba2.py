"""Mamba-2's state-space recurrence in its dual form: a masked product within a tile, the state from tile to tile
(Dao and Gu, Transformers are SSMs, 2024)."""

from __future__ import annotations

import torch

from moonpool_worker.kernels.scans.segments import StatePlan, decays, rows_of, run, tile_size, tiles


def mamba2(
    plan: StatePlan,
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor,
    states: torch.Tensor,
) -> torch.Tensor:
    """See :class:`moonpool_worker.kernels.interface.Kernels`. Computed in float32."""
    out = torch.empty_like(x)
    a, skip = a.float(), d.float().unsqueeze(-1)

    def step(rows: torch.Tensor | slice, before: torch.Tensor) -> torch.Tensor:
        mine = x[rows].float()
        y, after = _step(mine, dt[rows].float(), a, b[rows].float(), c[rows].float(), before)
        out[rows] = y.add_(mine * skip).to(out.dtype)
        return after

    def scan(rows: slice, before: torch.Tensor) -> torch.Tensor:
        y, after = _scan(x[rows], dt[rows].float(), a, b[rows], c[rows], before)
        out[rows] = (y + x[rows].float() * skip).to(out.dtype)
        return after

    run(plan, states, step, scan)
    return out


def _step(
    x: torch.Tensor, dt: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """B sequences, one token each; ``state`` [B, H, Dv, N] is overwritten."""
    heads = x.shape[1]
    state *= (dt * a).exp_()[..., None, None]
    # Per group, its heads' rows below one another: they share b and c.
    batch, groups, width = b.shape
    grouped = state.view(batch * groups, -1, width)  # [B * G, H / G * Dv, N]
    inputs = (x * dt.unsqueeze(-1)).view(batch * groups, -1, 1)
    grouped.addcmul_(inputs, b.reshape(batch * groups, 1, width))
    y = torch.bmm(c.reshape(batch * groups, 1, width), grouped.transpose(1, 2))
    return y.view(batch, heads, -1), state


def _scan(
    x: torch.Tensor, dt: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """L tokens of one sequence; ``state`` [H, Dv, N] is left as it is."""
    rows, heads, _ = x.shape
    size = tile_size(rows)
    inputs, steps, keys, queries = (tiles(part, size) for part in (x, dt, b, c))
    count, groups = keys.shape[:2]
    share = heads // groups
    total = tiles(dt * a, size).cumsum(2)  # [tiles, H, C]
    inputs *= steps.unsqueeze(-1)
    overlap = torch.matmul(queries, keys.transpose(2, 3))  # [tiles, G, C, C]
    mixing = decays(total).view(count, groups, share, size, size).mul_(overlap.unsqueeze(2))
    out = torch.matmul(mixing.view(count, heads, size, size), inputs)
    since_start, to_end = total.exp().unsqueeze(-1), (total[:, :, -1:] - total).exp_().unsqueeze(-1)
    kept = since_start[:, :, -1:]  # [tiles, H, 1, 1]
    written = (inputs * to_end).transpose(2, 3)  # [tiles, H, Dv, C]
    keys, queries = (
        part.unsqueeze(2).expand(-1, -1, share, -1, -1).reshape(count, heads, size, -1) for part in (keys, queries)
    )
    queries = queries * since_start
    for tile in range(count):
        out[tile].baddbmm_(queries[tile], state.transpose(1, 2))
        state = torch.baddbmm(state * kept[tile], written[tile], keys[tile])
    return rows_of(out, rows), state
