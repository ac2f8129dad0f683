"""What the scheduler hands to the model runner for one forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class SequenceChunk:
    """A run of consecutive new tokens of one request.

    ``token_ids`` are the tokens to compute; the first has absolute position ``start``. ``block_ids`` is the request's
    block table: entry ``i`` holds positions ``i * P`` to ``(i + 1) * P - 1``, and it covers ``start + len(token_ids)``.
    """

    token_ids: Sequence[int]
    start: int
    block_ids: Sequence[int]
    wants_logits: bool = True

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


@dataclass(slots=True)
class StepBatch:
    """All chunks of one step. Logits are returned for the last token of each chunk with ``wants_logits``."""

    chunks: list[SequenceChunk] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return sum(len(chunk.token_ids) for chunk in self.chunks)
