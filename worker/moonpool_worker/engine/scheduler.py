"""Which tokens of which requests are computed in the next step.

Decodes go first, one token each; then prompts that are under way, in chunks; then newcomers, first come first served.
A newcomer waits, without holding up those behind it, while its pages come from L3 or while somebody else is computing
the very page it needs next: a prefix shared by many is computed once. When L1 is full the youngest request gives its
blocks back and starts again later, from what the cache kept of it; the oldest always goes on, so there is no deadlock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from moonpool_worker.cache.kv_cache import KVCache
from moonpool_worker.engine.batch import SequenceChunk
from moonpool_worker.engine.request import Request, State


@dataclass(slots=True)
class Work:
    """One request's part of a step."""

    request: Request
    chunk: SequenceChunk


class Scheduler:
    """Not thread-safe. A step is :meth:`schedule`, the forward pass, :meth:`computed`, then new tokens appended."""

    def __init__(self, cache: KVCache, max_batch_tokens: int, max_running: int) -> None:
        if max_batch_tokens < max_running:
            raise ValueError(f"a step of {max_batch_tokens} tokens cannot hold {max_running} running requests")
        self._cache = cache
        self._page = cache.granularity
        self._max_batch_tokens = max_batch_tokens
        self._max_running = max_running
        self._in_flight: dict[bytes, Request] = {}
        self.waiting: deque[Request] = deque()
        #: In order of admission: the youngest is last.
        self.running: list[Request] = []
        self.preemptions = 0

    @property
    def fetching(self) -> bool:
        """Whether a request waits for L3."""
        return any(request.fetch is not None for request in self.waiting)

    def __len__(self) -> int:
        return len(self.waiting) + len(self.running)

    def requests(self) -> Iterator[Request]:
        yield from self.running
        yield from self.waiting

    def fits(self, tokens: int) -> bool:
        """Whether a sequence of ``tokens`` tokens could ever be held by L1, all else gone."""
        return -(-tokens // self._page) <= self._cache.usable_blocks

    def add(self, request: Request) -> None:
        """ValueError when its prompt and one more token could never fit."""
        if not self.fits(len(request.token_ids) + 1):
            raise ValueError(f"the prompt's {len(request.token_ids)} tokens do not fit in L1")
        self.waiting.append(request)

    def remove(self, request: Request) -> None:
        """Forget a request in any state, and give back all that it holds. Twice is once."""
        if request.state is State.FINISHED:
            return
        if request.state is State.RUNNING:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        self._let_go(request)
        request.state = State.FINISHED

    # -- a step ------------------------------------------------------------------------------------------------

    def schedule(self) -> list[Work]:
        work: list[Work] = []
        budget = self._max_batch_tokens
        for request in list(self.running):
            # An older request may have pushed this one out a moment ago.
            if request.state is State.RUNNING and request.pending == 1 and self._make_room(request):
                work.append(self._chunk(request, 1))
                budget -= 1
        for request in self.running:
            if request.pending > 1:
                budget -= self._prefill(request, budget, work)
        self._look_up()
        for request in list(self.waiting):
            if budget <= 0 or len(self.running) >= self._max_running:
                break
            if not self._is_prepared(request):
                continue
            if not self._admit(request):
                # Nobody overtakes the one that needs more room, else it might never get it.
                break
            budget -= self._prefill(request, budget, work)
        return work

    def computed(self, work: list[Work]) -> None:
        """The forward pass is done: full pages can be found by others from now on."""
        for item in work:
            request = item.request
            request.computed = item.chunk.end
            assert request.allocation is not None
            pages = request.computed // self._page
            if pages <= request.allocation.published or not self._cache.prefix_caching:
                continue
            request.chain = self._cache.chain(request.token_ids, request.salt, request.chain)
            self._cache.publish(request.allocation, request.chain, request.computed)
            for digest in request.chain[:pages]:
                if digest in request.claims:
                    self._unclaim(request, digest)

    # -- inside ------------------------------------------------------------------------------------------------

    def _chunk(self, request: Request, tokens: int) -> Work:
        assert request.allocation is not None
        start = request.computed
        chunk = SequenceChunk(
            token_ids=request.token_ids[start : start + tokens],
            start=start,
            tables=(request.allocation.block_ids,),
            wants_logits=start + tokens == len(request.token_ids),
        )
        return Work(request, chunk)

    def _prefill(self, request: Request, budget: int, work: list[Work]) -> int:
        """Add the next chunk of a prompt; returns its tokens."""
        tokens = min(request.pending, budget)
        if tokens < request.pending:
            # Chunks end at page borders, so that each one's pages can be published at once.
            tokens -= (request.computed + tokens) % self._page
        if tokens <= 0:
            return 0
        work.append(self._chunk(request, tokens))
        return tokens

    def _make_room(self, request: Request) -> bool:
        """Room for the token that is about to be computed; False when ``request`` itself had to go."""
        assert request.allocation is not None
        while not self._cache.extend(request.allocation, len(request.token_ids)):
            youngest = self.running[-1]
            self._preempt(youngest)
            if youngest is request:
                return False
        return True

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self._let_go(request)
        request.state = State.WAITING
        request.computed = 0
        request.timeline.preempted()
        self.preemptions += 1
        self.waiting.appendleft(request)

    def _let_go(self, request: Request) -> None:
        if request.fetch is not None:
            self._cache.drop_fetch(request.fetch)
            request.timeline.fetched()
            request.fetch = None
        if request.allocation is not None:
            self._cache.free(request.allocation)
            request.allocation = None
        for digest in list(request.claims):
            self._unclaim(request, digest)

    # -- newcomers ---------------------------------------------------------------------------------------------

    def _look_up(self) -> None:
        """Begin fetches for those who will be next, also while there is no room for them yet."""
        for request, _ in zip(self.waiting, range(self._max_running), strict=False):
            if not request.fetch_tried:
                self._is_prepared(request)

    def _is_prepared(self, request: Request) -> bool:
        """Whether nothing that would spare it work is still on its way."""
        if not self._cache.prefix_caching:
            return True
        if request.fetch is not None:
            return request.fetch.done
        if request.waits_for is not None and request.waits_for in self._in_flight:
            return False
        request.waits_for = None
        request.chain = self._cache.chain(request.token_ids, request.salt, request.chain)
        found = self._cache.probe(request.chain).blocks
        if found >= self._reusable(request):
            return True
        owner = self._in_flight.get(request.chain[found])
        if owner is not None and owner is not request:
            request.waits_for = request.chain[found]
            return False
        if request.fetch_tried:
            return True
        request.fetch_tried = True
        request.fetch = self._cache.start_fetch(request.chain)
        if request.fetch is None:
            return True
        request.timeline.fetching()
        self._claim(request, request.chain[found:])
        return request.fetch.done

    def _reusable(self, request: Request) -> int:
        """Pages that could come from a cache: the last token is always computed."""
        return min(len(request.chain), (len(request.token_ids) - 1) // self._page)

    def _admit(self, request: Request) -> bool:
        tokens = len(request.token_ids)
        if self.running:
            # Leave the others a block each to grow into: filling up to the last block means preempting at once.
            needed = -(-tokens // self._page) - self._cache.probe(request.chain).l1
            if needed + len(self.running) > self._cache.available_blocks:
                return False
        allocation = self._cache.admit(request.chain, tokens, request.fetch)
        if allocation is None:
            return False
        for digest in list(request.claims):
            self._unclaim(request, digest)
        self.waiting.remove(request)
        self.running.append(request)
        request.timeline.admitted()
        if request.fetch is not None:
            request.timeline.fetched()
            request.l3_reason = request.fetch.outcome
            request.fetch = None
        request.allocation = allocation
        request.computed = allocation.cached_tokens
        request.state = State.RUNNING
        if request.cached is None:
            request.cached = allocation.cached
        self._claim(request, request.chain[request.computed // self._page :])
        return True

    def _claim(self, request: Request, digests: list[bytes]) -> None:
        for digest in digests:
            if self._in_flight.setdefault(digest, request) is request:
                request.claims.add(digest)

    def _unclaim(self, request: Request, digest: bytes) -> None:
        request.claims.discard(digest)
        if self._in_flight.get(digest) is request:
            del self._in_flight[digest]
