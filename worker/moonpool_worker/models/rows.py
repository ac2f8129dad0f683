"""From a batch to its flat rows: token ids, positions, and the rows whose logits are wanted."""

from __future__ import annotations

import torch

from moonpool_worker.engine.batch import StepBatch


def token_ids(batch: StepBatch, device: torch.device) -> torch.Tensor:
    """int64 [T]."""
    return torch.tensor([token for chunk in batch.chunks for token in chunk.token_ids], device=device)


def positions(batch: StepBatch, device: torch.device) -> torch.Tensor:
    """int64 [T]: absolute positions in their texts."""
    flat = [position for chunk in batch.chunks for position in range(chunk.start, chunk.end)]
    return torch.tensor(flat, device=device)


def last_rows(batch: StepBatch, x: torch.Tensor) -> torch.Tensor:
    """Of ``x`` [T, …] the last row of each chunk that wants logits; ``x`` itself when that is all of it."""
    rows, end = [], 0
    for chunk in batch.chunks:
        end += len(chunk.token_ids)
        if chunk.wants_logits:
            rows.append(end - 1)
    return x if len(rows) == x.shape[0] else x[torch.tensor(rows, dtype=torch.long, device=x.device)]
