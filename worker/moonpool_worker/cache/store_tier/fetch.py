"""One request's blocks on their way from L3 to L2."""

from __future__ import annotations

from dataclasses import dataclass, field

from moonpool_worker.cache.prefix_index import Node


@dataclass(slots=True, eq=False)
class Fetch:
    """Pages ``first`` to ``first + wanted - 1`` of ``chain``.

    ``done`` when all have arrived, the store does not have them, or ``deadline`` (monotonic seconds) has passed; the
    request is then admitted with whatever is there. The nodes in ``held`` stay in L2 until it is admitted or the fetch
    is dropped.
    """

    chain: list[bytes]
    first: int
    wanted: int
    started: float
    deadline: float
    calls: int = 0
    done: bool = False
    outcome: str = ""
    held: list[Node] = field(default_factory=list)
    #: (group, link) of the pages that this fetch brought from L3.
    fetched: set[tuple[int, bytes]] = field(default_factory=set)


@dataclass(slots=True)
class Call:
    """A request to the L3 process that has not been answered; ``positions`` are pages of the fetch's chain."""

    kind: str
    sent: float
    deadline: float
    fetch: Fetch | None = None
    positions: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
