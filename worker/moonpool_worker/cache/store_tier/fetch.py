"""One request's blocks on their way from L3 to L2."""

from __future__ import annotations

from dataclasses import dataclass, field

from moonpool_worker.cache.prefix_index import Node
from moonpool_worker.cache.prefix_match import Has

#: A block of a request's text: (cache group, page).
Place = tuple[int, int]


@dataclass(slots=True, eq=False)
class Fetch:
    """The blocks of ``chain`` that are not ``here`` (in L1 or L2), as far as its first ``pages`` pages need them.

    ``done`` when all have arrived, the store does not have them, or ``deadline`` (monotonic seconds) has passed; the
    request is then admitted with whatever is there. The nodes in ``held`` stay in L2 until it is admitted or the fetch
    is dropped. ``fetched``: the (group, digest) that came from L3.
    """

    chain: list[bytes]
    pages: int
    here: Has
    started: float
    since: float
    deadline: float
    stored: set[Place] = field(default_factory=set)
    wanted: int = 0
    calls: int = 0
    done: bool = False
    outcome: str = ""
    held: list[Node] = field(default_factory=list)
    fetched: set[tuple[int, bytes]] = field(default_factory=set)
