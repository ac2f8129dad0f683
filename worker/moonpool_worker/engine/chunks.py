"""From what a request holds of the cache to what the model runner is told of its next tokens."""

from __future__ import annotations

from moonpool_worker.cache.allocation import Allocation, Hold
from moonpool_worker.engine.batch import SequenceChunk, StateSlots
from moonpool_worker.engine.request import Request


def chunk_of(request: Request, tokens: int, has_states: bool) -> SequenceChunk:
    """The next ``tokens`` tokens of a request, for which :meth:`KVCache.extend` has made room.

    The block tables are the allocation's own lists: they are right until the step is over.
    """
    allocation = request.allocation
    assert allocation is not None
    start = request.computed
    end = start + tokens
    return SequenceChunk(
        request.token_ids[start:end],
        start,
        allocation.tables,
        end == len(request.token_ids),
        states_of(allocation, end) if has_states else (),
    )


def states_of(allocation: Allocation, end: int) -> tuple[StateSlots | None, ...]:
    """Per group: None for history; else where the state comes from, and where it goes on the way to ``end``."""
    return tuple(_slots(hold, end) if hold.live else None for hold in allocation.holds)


def _slots(hold: Hold, end: int) -> StateSlots:
    if not hold.checkpoints:
        return StateSlots(hold.source, ((end, hold.live),))
    kept = sorted((at, block) for at, block in hold.checkpoints.items() if at <= end)
    return StateSlots(hold.source, (*kept, (end, hold.live)))
