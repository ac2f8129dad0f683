"""What the scheduler hands to the model runner for one forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class StateSlots:
    """Where a chunk's recurrent state comes from, and where it goes, in one state group.

    ``source`` is the block with the state before the chunk's first token; block 0, which is all zeros, at the start of
    a text. ``targets`` are ``(position, block)`` in ascending order: the state after ``position`` tokens of the text is
    written to ``block``. The last position is the chunk's end; the ones before it are checkpoints on its way.
    ``source`` may be a target too (a decode in place).
    """

    source: int
    targets: Sequence[tuple[int, int]]


@dataclass(slots=True)
class SequenceChunk:
    """A run of consecutive new tokens of one request.

    ``token_ids`` are the tokens to compute; the first has absolute position ``start``. ``tables[g]`` is the block table
    of cache group ``g``: entry ``i`` holds positions ``i * block_tokens`` to ``(i + 1) * block_tokens - 1``, 0 where a
    sliding window has passed; it covers ``end``. For a state group it is empty, and ``states[g]`` says the rest.
    """

    token_ids: Sequence[int]
    start: int
    tables: Sequence[Sequence[int]]
    wants_logits: bool = True
    states: Sequence[StateSlots | None] = ()

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
