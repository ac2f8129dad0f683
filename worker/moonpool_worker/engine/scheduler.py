"""Which tokens of which requests are computed in the next step.

Decodes go first, one token each. What is left of the step's tokens goes to prompts: half of it to the one that has been
under way longest, the rest to the others, those that have least to do first; what nobody else wants is the first one's
too. So a long prompt does not hold up the short ones behind it, and however many of them come, it never gets less than
half; and as every prompt becomes the longest under way, none waits forever. Newcomers are admitted first come first
served: nobody overtakes one that waits for room, else it might never get it.

A newcomer waits, without holding up those behind it, while its pages come from L3 or while somebody else is computing
the very pages it needs next: a prefix shared by many is computed once. When L1 is full the youngest request makes room:
to L2 if that can take it, to go on later where it stopped, else it starts again from what the cache kept of it. The
oldest always goes on, so there is no deadlock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from moonpool_worker.cache.kv_cache import KVCache
from moonpool_worker.engine.batch import SequenceChunk
from moonpool_worker.engine.chunks import chunk_of, states_of
from moonpool_worker.engine.in_flight import InFlight
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
        self._has_states = cache.has_states
        self._max_batch_tokens = max_batch_tokens
        self._max_running = max_running
        self._in_flight = InFlight()
        self._work: dict[Request, Work] = {}
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
        return self._cache.fits(tokens, self._max_batch_tokens)

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
        self._work = {}
        prompts = self._decode()
        self._look_up()
        self._prefill(prompts, self._max_batch_tokens - len(self._work))
        work, self._work = list(self._work.values()), {}
        return work

    def computed(self, work: list[Work]) -> None:
        """The forward pass is done: full pages can be found by others from now on."""
        caching, has_states = self._cache.prefix_caching, self._has_states
        for item in work:
            request = item.request
            request.computed = computed = item.chunk.end
            allocation = request.allocation
            assert allocation is not None
            published = allocation.published
            if computed // self._page > published and caching:
                request.chain = self._cache.chain(request.token_ids, request.salt, request.chain)
                self._cache.publish(allocation, request.chain, computed)
                if request.claims:
                    self._in_flight.release(request, request.chain[published : allocation.published])
            elif has_states:
                self._cache.publish(allocation, request.chain, computed)
            else:
                allocation.computed = computed

    # -- decodes -----------------------------------------------------------------------------------------------

    def _decode(self) -> list[Request]:
        """Plan one token for everybody who needs just one; returns those who need more."""
        prompts = []
        work, running, has_states = self._work, State.RUNNING, self._has_states
        for request in list(self.running):
            # An older request may have pushed this one out a moment ago.
            if request.state is not running:
                continue
            tokens, computed, allocation = request.token_ids, request.computed, request.allocation
            assert allocation is not None
            if len(tokens) > computed + 1:
                prompts.append(request)
            elif computed < allocation.room or self._make_room(request, computed + 1):
                states = states_of(allocation, computed + 1) if has_states else ()
                work[request] = Work(request, SequenceChunk(tokens[-1:], computed, allocation.tables, True, states))
        return [request for request in prompts if request.state is running]

    def _make_room(self, request: Request, tokens: int, insist: bool = True) -> bool:
        """Room for the tokens up to ``tokens``; False when ``request`` itself had to go, or has to wait.

        Without ``insist`` the youngest of several waits for the others instead of giving up what it has.
        """
        assert request.allocation is not None
        while not self._cache.extend(request.allocation, tokens):
            youngest = self.running[-1]
            if youngest is request and not insist and len(self.running) > 1:
                return False
            self._preempt(youngest)
            if youngest is request:
                return False
        return True

    # -- prompts -----------------------------------------------------------------------------------------------

    def _prefill(self, prompts: list[Request], budget: int) -> None:
        """Share the step's remaining tokens among the prompts under way and newcomers."""
        first = prompts[0] if prompts else None
        left = budget - self._share(first, budget)
        others = sorted(prompts[1:], key=lambda request: request.pending, reverse=True)
        for request in list(self.waiting):
            if left <= 0 or len(self.running) >= self._max_running:
                break
            if not self._is_prepared(request):
                continue
            while others and left > 0 and others[-1].pending <= request.unknown:
                left -= self._chunk(others.pop(), left)
            if left <= 0 or not self._admit_at_last(request):
                break
            if first is None:
                first = request
                left -= self._share(first, budget)
            else:
                left -= self._chunk(request, left)
        while others and left > 0:
            left -= self._chunk(others.pop(), left)
        if first is not None:
            self._chunk(first, left + self._share(first, budget))

    def _share(self, first: Request | None, budget: int) -> int:
        """What is kept for the prompt that has been under way longest."""
        return 0 if first is None else min(first.pending, budget // 2)

    def _chunk(self, request: Request, budget: int) -> int:
        """Plan the next chunk of a prompt; returns its tokens."""
        if request.state is not State.RUNNING:
            return 0
        tokens = min(request.pending, budget)
        if tokens < request.pending:
            # Chunks end at page borders, so that each one's pages can be published at once; but go on they must.
            over = (request.computed + tokens) % self._page
            tokens -= over if over < tokens else 0
        if tokens <= 0 or not self._make_room(request, request.computed + tokens, insist=False):
            return 0
        self._work[request] = Work(request, chunk_of(request, tokens, self._has_states))
        return tokens

    # -- making room -------------------------------------------------------------------------------------------

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self._work.pop(request, None)
        assert request.allocation is not None
        request.suspended = self._cache.suspend(request.allocation)
        if request.suspended is not None:
            request.allocation = None
        self._let_go(request, keep_suspended=True)
        request.state = State.WAITING
        if request.suspended is None:
            request.computed = 0
        request.timeline.preempted()
        self.preemptions += 1
        self.waiting.appendleft(request)

    def _let_go(self, request: Request, keep_suspended: bool = False) -> None:
        if request.fetch is not None:
            self._cache.drop_fetch(request.fetch)
            request.timeline.fetched()
            request.fetch = None
        if request.allocation is not None:
            self._cache.free(request.allocation)
            request.allocation = None
        if request.suspended is not None and not keep_suspended:
            self._cache.drop_suspended(request.suspended)
            request.suspended = None
        self._in_flight.release_all(request)

    # -- newcomers ---------------------------------------------------------------------------------------------

    def _look_up(self) -> None:
        """Begin fetches for those who will be next, also while there is no room for them yet."""
        for request, _ in zip(self.waiting, range(self._max_running), strict=False):
            if not request.fetch_tried:
                self._is_prepared(request)

    def _is_prepared(self, request: Request) -> bool:
        """Whether nothing that would spare it work is still on its way."""
        if not self._cache.prefix_caching or request.suspended is not None:
            request.unknown = request.pending
            return True
        if request.fetch is not None:
            return request.fetch.done
        if request.waits_for is not None and request.waits_for in self._in_flight:
            return False
        request.waits_for = None
        if request.probed_at != self._cache.changes:
            request.chain = self._cache.chain(request.token_ids, request.salt, request.chain)
            request.found = self._cache.probe(request.chain).blocks
            request.probed_at = self._cache.changes
        found, reusable = request.found, self._reusable(request)
        request.unknown = len(request.token_ids) - min(found, reusable) * self._page
        if found >= reusable:
            return True
        shared = self._computed_elsewhere(request, found, reusable)
        if shared > found:
            request.waits_for = request.chain[shared - 1]
            return False
        if request.fetch_tried:
            return True
        request.fetch_tried = True
        request.fetch = self._cache.start_fetch(request.chain, len(request.token_ids))
        if request.fetch is None:
            request.l3_reason = self._cache.fetch_refusal
            return True
        request.timeline.fetching()
        self._in_flight.claim(request, request.chain[found:])
        return request.fetch.done

    def _computed_elsewhere(self, request: Request, found: int, reusable: int) -> int:
        """Up to which page another request is computing what this one needs next; ``found`` when nobody is."""
        if not self._has_states:
            return self._in_flight.first_run(request, request.chain, found, reusable)
        # Pages alone do not help a recurrent model: the other one has to keep its state where the two texts part.
        last = self._in_flight.last(request, request.chain, found, reusable)
        if last is None:
            return found
        shared, owner = last
        if owner.allocation is not None:
            self._cache.keep_state(owner.allocation, shared * self._page)
        return shared

    def _reusable(self, request: Request) -> int:
        """Pages that could come from a cache: the last token is always computed."""
        return min(len(request.chain), (len(request.token_ids) - 1) // self._page)

    def _admit_at_last(self, request: Request) -> bool:
        if self._admit(request):
            return True
        if self.running:
            return False
        # Nobody is left who could make room, so it must be what the cache holds that is in the way.
        self._cache.empty_l1()
        return self._admit(request)

    def _admit(self, request: Request) -> bool:
        # Leave the others a block each to grow into: filling up to the last block means preempting at once.
        spare, chunk = len(self.running), self._max_batch_tokens
        if request.suspended is not None:
            allocation = self._cache.resume(request.suspended, len(request.token_ids), chunk, spare)
            if allocation is None and request.suspended.lost:
                self._cache.drop_suspended(request.suspended)
                request.suspended, request.computed = None, 0
        else:
            allocation = self._cache.admit(request.chain, len(request.token_ids), request.fetch, chunk, spare)
        if allocation is None:
            return False
        request.suspended = None
        self._in_flight.release_all(request)
        self.waiting.remove(request)
        self.running.append(request)
        request.timeline.admitted()
        if request.fetch is not None:
            request.timeline.fetched()
            request.l3_reason = request.fetch.outcome
            request.fetch = None
        request.allocation = allocation
        request.computed = allocation.computed
        request.state = State.RUNNING
        if request.cached is None:
            request.cached = allocation.cached
        self._in_flight.claim(request, request.chain[request.computed // self._page :])
        return True
