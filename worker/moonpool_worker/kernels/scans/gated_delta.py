"""The gated delta rule, with one decay per head (Gated DeltaNet) or one per channel (Kimi Delta Attention).

Within a tile of C tokens, with G the running sum of the logarithms of the decay and S the state before the tile, what
token t writes is::

    u_t = beta_t (v_t - exp(G_t) k_t S - sum_{i<t} exp(G_t - G_i) (k_t · k_i) u_i)

That is a triangular system whose matrix does not know S. It is solved for all tiles at once; only three products a tile
are left to do in order (Yang et al., Parallelizing Linear Transformers with the Delta Rule, 2024).
"""

from __future__ import annotations

import torch

from moonpool_worker.kernels.scans.segments import StatePlan, decays, rows_of, run, tile_size, tiles

#: Rows whose decays per channel are multiplied out; between blocks of them a common reference is taken.
_SUB = 16


def gated_delta(
    plan: StatePlan,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
) -> torch.Tensor:
    """See :class:`moonpool_worker.kernels.interface.Kernels`. ``g`` must not be positive. Computed in float32."""
    out = torch.empty_like(v)

    def step(rows: torch.Tensor | slice, before: torch.Tensor) -> torch.Tensor:
        attended, after = _step(q[rows], k[rows], v[rows], g[rows], beta[rows], before)
        out[rows] = attended.to(out.dtype)
        return after

    def scan(rows: slice, before: torch.Tensor) -> torch.Tensor:
        attended, after = _scan(q[rows], k[rows], v[rows], g[rows], beta[rows], before)
        out[rows] = attended.to(out.dtype)
        return after

    run(plan, states, step, scan)
    return out


def _step(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """B sequences, one token each; ``state`` [B, H, Dk, Dv] is overwritten."""
    decay = g.float().exp()
    state *= decay[..., None] if g.dim() == 3 else decay[..., None, None]
    batch, heads = k.shape[:2]
    flat = state.flatten(0, 1)
    keys = k.float().flatten(0, 1).unsqueeze(1)  # [B * H, 1, Dk]
    held = torch.bmm(keys, flat).view(batch, heads, -1)
    update = (v.float() - held) * beta.float().unsqueeze(-1)
    flat.addcmul_(keys.transpose(1, 2), update.flatten(0, 1).unsqueeze(1))
    attended = torch.bmm(q.float().flatten(0, 1).unsqueeze(1), flat)
    return attended.view(batch, heads, -1), state


def _scan(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """L tokens of one sequence; ``state`` [H, Dk, Dv] is left as it is."""
    rows = q.shape[0]
    size = tile_size(rows)
    queries, keys, values, rates = (tiles(x, size) for x in (q, k, v, beta))
    rates = rates.unsqueeze(-1)
    total = tiles(g, size).cumsum(2)
    if g.dim() == 3:
        read, write = _products_by_channel(queries, keys, total)
    else:
        decay = decays(total)
        read, write = (torch.matmul(x, keys.transpose(2, 3)).mul_(decay) for x in (queries, keys))
        total = total.unsqueeze(-1)
    since_start = total.exp()
    # Only what lies below the diagonal is looked at.
    system = write.mul_(rates)
    right = torch.cat([values, keys * since_start], dim=-1).mul_(rates)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    updates, seen = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    queries *= since_start
    keys = keys.mul_((total[:, :, -1:] - total).exp_()).transpose(2, 3)
    kept = since_start[:, :, -1].unsqueeze(-1)  # [tiles, H, Dk or 1, 1]
    out = torch.empty_like(values)
    for tile in range(values.shape[0]):
        update = torch.baddbmm(updates[tile], seen[tile], state, alpha=-1)
        torch.baddbmm(torch.bmm(queries[tile], state), read[tile], update, out=out[tile])
        state = torch.baddbmm(state * kept[tile], keys[tile], update)
    return rows_of(out, rows), state


def _products_by_channel(
    queries: torch.Tensor, keys: torch.Tensor, total: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """sum_d x_t[d] k_i[d] exp(G_t[d] - G_i[d]) for i ≤ t, for x of queries and of keys: each [tiles, H, C, C].

    The exponent of a product of two factors must be split between them; against the block's first row both are at most
    0, so that nothing overflows however strong the decay.
    """
    count, heads, size, dim = keys.shape
    both = torch.stack([queries, keys])
    out = torch.zeros(2, count, heads, size, size, dtype=keys.dtype, device=keys.device)
    for first in range(_SUB, size, _SUB):
        mine = slice(first, first + _SUB)
        reference = total[:, :, first - 1 : first]
        left = both[..., mine, :] * (total[:, :, mine] - reference).exp_()
        right = keys[:, :, :first] * (reference - total[:, :, :first]).exp_()
        out[..., mine, :first] = torch.matmul(left, right.transpose(2, 3))
    blocks = size // _SUB
    square = out.view(2, count, heads, blocks, _SUB, blocks, _SUB).diagonal(dim1=3, dim2=5)  # [..., SUB, SUB, blocks]
    both = both.view(2, count, heads, blocks, _SUB, dim)
    keys, total = (x.view(count, heads, blocks, _SUB, dim) for x in (keys, total))
    for column in range(_SUB):
        decayed = (total[..., column:, :] - total[..., column : column + 1, :]).exp_()
        decayed *= keys[..., column : column + 1, :]
        square[..., column:, column, :] = (both[..., column:, :] * decayed).sum(-1).transpose(-1, -2)
    return out[0], out[1]
