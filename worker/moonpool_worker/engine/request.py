"""One sequence from its prompt to its last token, as the engine's thread sees it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from moonpool_worker.cache.allocation import Allocation
from moonpool_worker.cache.stats import TierTokens
from moonpool_worker.cache.store_tier.fetch import Fetch
from moonpool_worker.cache.suspension import Suspended
from moonpool_worker.engine.timeline import Timeline
from moonpool_worker.sampling.params import SamplingParams
from moonpool_worker.sampling.sampler import SampledToken, SamplerState


class State(StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(slots=True)
class Output:
    """What one step added to one sequence: a token, unless it was aborted; ``error`` says why it was."""

    text: str = ""
    token: SampledToken | None = None
    finish_reason: FinishReason | None = None
    error: str = ""


class TextStream(Protocol):
    """Turns token ids into text that may be shown."""

    def push(self, token_id: int) -> tuple[str, bool]:
        """Text that is certain now, and whether a stop string was met."""

    def finish(self) -> str:
        """What was held back, when generation ends for another reason."""


class Sink(Protocol):
    """Where outputs go; called on the event loop's thread."""

    def put(self, index: int, output: Output) -> None: ...


_serial = itertools.count()


@dataclass(slots=True, eq=False)
class Request:
    """``token_ids`` are the prompt and what was generated; the first ``computed`` of them have their KV in L1.

    ``index`` tells the choices of one API call apart. ``max_tokens`` counts generated tokens. A token of ``stop_ids``
    ends the sequence. ``salt`` holds the extra keys of the hash chain. ``l3_reason``: how its look into L3 ended, or
    why there was none.
    """

    id: str
    token_ids: list[int]
    max_tokens: int
    sink: Sink
    text: TextStream
    sampling: SamplingParams = field(default_factory=SamplingParams)
    index: int = 0
    stop_ids: frozenset[int] = frozenset()
    salt: bytes = b""
    timeline: Timeline = field(default_factory=Timeline)

    serial: int = field(default_factory=lambda: next(_serial))
    prompt_tokens: int = field(init=False)
    chance: SamplerState = field(init=False)
    state: State = State.WAITING
    computed: int = 0
    chain: list[bytes] = field(default_factory=list)
    allocation: Allocation | None = None
    #: What it had when it made room for others, until it goes on.
    suspended: Suspended | None = None
    cached: TierTokens | None = None
    fetch: Fetch | None = None
    fetch_tried: bool = False
    #: Links that this request is computing or fetching right now, and the one of somebody else's that it waits for.
    claims: set[bytes] = field(default_factory=set)
    waits_for: bytes | None = None
    #: Pages found when the cache was last asked, when that was, and the tokens that would be left to compute.
    found: int = 0
    probed_at: int = -1
    unknown: int = 0
    l3_reason: str = ""
    finish_reason: FinishReason | None = None

    def __post_init__(self) -> None:
        if not self.token_ids:
            raise ValueError("a prompt has at least one token")
        self.prompt_tokens = len(self.token_ids)
        self.chance = SamplerState(self.sampling)

    @property
    def generated(self) -> int:
        return len(self.token_ids) - self.prompt_tokens

    @property
    def pending(self) -> int:
        """Tokens that have no KV yet."""
        return len(self.token_ids) - self.computed
