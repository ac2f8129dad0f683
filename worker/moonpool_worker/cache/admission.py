"""What a request finds in L1 and L2, and how it gets its first blocks: everything it needs, or nothing at all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moonpool_worker.cache.allocation import Allocation, Hold, Probe
from moonpool_worker.cache.cache_group import CacheGroup, Retention
from moonpool_worker.cache.device_arena import NULL_BLOCK
from moonpool_worker.cache.device_tier import DeviceTier
from moonpool_worker.cache.host_tier import HostTier
from moonpool_worker.cache.prefix_index import Node
from moonpool_worker.cache.prefix_match import Composition, Match
from moonpool_worker.cache.stats import CacheStats, TierTokens
from moonpool_worker.cache.store_tier.fetch import Fetch
from moonpool_worker.cache.tier_copies import TierCopies


@dataclass(slots=True)
class _Found:
    """What a hit reads of one group, by position: nodes that L1 has, and those that only L2 has."""

    here: dict[int, Node]
    below: dict[int, Node]


class Admission:
    """The rules of a hit. It holds nothing itself."""

    def __init__(
        self,
        device: DeviceTier,
        host: HostTier | None,
        composition: Composition,
        copies: TierCopies,
        stats: CacheStats,
        prefix_caching: bool,
    ) -> None:
        self._device = device
        self._pool = device.pool
        self._page = device.page
        self._host = host
        self._composition = composition
        self._copies = copies
        self._stats = stats
        self._prefix_caching = prefix_caching

    # -- looking -----------------------------------------------------------------------------------------------

    def probe(self, chain: Sequence[bytes]) -> Probe:
        if not self._prefix_caching:
            return Probe(0, 0, self._page)
        in_l1 = self._match(chain, len(chain), below=False)
        if self._host is None:
            return Probe(in_l1.boundary, 0, self._page, in_l1.agreed)
        both = self._match(chain, len(chain))
        return Probe(in_l1.boundary, both.boundary - in_l1.boundary, self._page, both.agreed)

    def has(self, chain: Sequence[bytes], group: int, position: int) -> bool:
        """Whether L1 or L2 has the group's page."""
        digest = chain[position]
        if self._pool.get(group, digest) is not None:
            return True
        return self._host is not None and self._host.index.get(group, digest) is not None

    def _match(self, chain: Sequence[bytes], pages: int, below: bool = True) -> Match:
        agreed = pages
        for group in self._device.groups:
            if group.closed:
                agreed = min(agreed, self._longest(group, chain, agreed, below))
        if below:
            return self._composition.below(agreed, lambda group, at: self.has(chain, group, at))
        return self._composition.below(agreed, lambda group, at: self._pool.get(group, chain[at]) is not None)

    def _longest(self, group: CacheGroup, chain: Sequence[bytes], pages: int, below: bool) -> int:
        found = self._device.longest(group, chain, pages)
        if below and self._host is not None:
            get = self._host.index.index(group.index).get
            while found < pages and get(chain[found]) is not None:
                found += 1
        return found

    # -- taking ------------------------------------------------------------------------------------------------

    def admit(
        self, chain: Sequence[bytes], tokens: int, fetch: Fetch | None, chunk: int, spare: int
    ) -> Allocation | None:
        if tokens < 1:
            raise ValueError(f"a request has at least one token, got {tokens}")
        # The last token is computed: its logits are wanted.
        pages = min(len(chain), (tokens - 1) // self._page) if self._prefix_caching else 0
        while True:
            match = self._match(chain, pages)
            found = [self._gather(group, chain, match.boundary) for group in self._device.groups]
            demand = self._demand(found, match.boundary, tokens, chunk)
            for each in found:
                for node in each.here.values():
                    self._pool.ref(node)
            if not self._pool.feasible(self._device.with_spare(demand, spare)):
                self._let_go(found)
                self._stats.refused += 1
                return None
            allocation = self._take(chain, tokens, match, found, demand, fetch)
            if allocation is not None:
                return allocation
            # A page of L2 was not what it should be, and has left the index: look again.

    def _gather(self, group: CacheGroup, chain: Sequence[bytes], boundary: int) -> _Found:
        found = _Found({}, {})
        for position in self._composition.needs(group.index, boundary):
            node = self._pool.get(group.index, chain[position])
            if node is not None:
                found.here[position] = node
            else:
                assert self._host is not None
                copy = self._host.index.get(group.index, chain[position])
                assert copy is not None
                found.below[position] = copy
        return found

    def _demand(self, found: Sequence[_Found], boundary: int, tokens: int, chunk: int) -> list[int]:
        demand = []
        for group, each in zip(self._device.groups, found, strict=True):
            copies = len(each.below) * group.kept
            if group.retention is Retention.STATE:
                demand.append(1 + copies)
                continue
            upto = tokens if group.closed else min(tokens, boundary * self._page + chunk)
            demand.append(group.blocks_for(upto) - boundary * group.per_page + copies)
        return demand

    def _let_go(self, found: Sequence[_Found]) -> None:
        for each in found:
            for node in reversed(each.here.values()):
                self._pool.unref(node)

    def _take(
        self,
        chain: Sequence[bytes],
        tokens: int,
        match: Match,
        found: Sequence[_Found],
        demand: Sequence[int],
        fetch: Fetch | None,
    ) -> Allocation | None:
        for each in found:
            for copy in each.below.values():
                # Taking blocks may evict from L1, which spills to L2: what is about to be read must stay.
                assert self._host is not None
                self._host.index.ref(copy)
        after = [
            max(each.here.items(), key=lambda item: item[0])[1].blocks[-1] if each.here else None for each in found
        ]
        taken = self._pool.take(demand, after)
        pages = [
            self._cut(group, each, blocks)
            for group, each, blocks in zip(self._device.groups, found, taken, strict=True)
        ]
        good = True
        for each, places in zip(found, pages, strict=True):
            good = good and (not each.below or self._copies.up(list(each.below.values()), places) is None)
        if good:
            allocation = self._build(chain, tokens, match, found, pages, taken)
            allocation.cached = self._tiers(chain, match.boundary, found, fetch)
            self._count(tokens, allocation.cached)
        for each in found:
            for copy in each.below.values():
                assert self._host is not None
                self._host.release(copy)
        if good:
            return allocation
        for group, blocks in enumerate(taken):
            self._pool.give(group, blocks)
        self._let_go(found)
        return None

    @staticmethod
    def _cut(group: CacheGroup, found: _Found, blocks: list[int]) -> list[tuple[int, ...]]:
        """The leading blocks, a page at a time: where the pages from L2 go."""
        return [tuple(blocks[at * group.kept : (at + 1) * group.kept]) for at in range(len(found.below))]

    def _build(
        self,
        chain: Sequence[bytes],
        tokens: int,
        match: Match,
        found: Sequence[_Found],
        pages: Sequence[Sequence[tuple[int, ...]]],
        taken: Sequence[list[int]],
    ) -> Allocation:
        boundary = match.boundary
        holds = []
        arrived: list[Node] = []
        for group, each, copied, blocks in zip(self._device.groups, found, pages, taken, strict=True):
            nodes = dict(each.here)
            for (position, copy), page in zip(each.below.items(), copied, strict=True):
                node = self._pool.insert(group.index, copy.digest, copy.parent, position, page, refs=1)
                node.hits = copy.hits
                nodes[position] = node
                arrived.append(node)
            holds.append(self._hold(group, nodes, boundary, blocks[len(copied) * group.kept :]))
        used = [node for hold in holds for node in (*hold.nodes, hold.origin) if node is not None]
        for node in used:
            node.hits += 1
        self._pool.touch(used)
        self._copies.arrived(arrived)
        self._copies.used((node.group, node.digest) for node in used)
        allocation = Allocation(holds, boundary * self._page, TierTokens(), boundary * self._page, boundary)
        allocation.wanted = self._checkpoints(match, tokens)
        self._device.settle(allocation)
        return allocation

    def _hold(self, group: CacheGroup, nodes: dict[int, Node], boundary: int, fresh: list[int]) -> Hold:
        if group.retention is Retention.STATE:
            origin = nodes.get(boundary - 1)
            return Hold(live=fresh[0], source=origin.blocks[0] if origin else NULL_BLOCK, origin=origin)
        hold = Hold()
        for position in range(boundary):
            node = nodes.get(position)
            hold.nodes.append(node)
            kept = node.blocks if node is not None else ()
            hold.table += [NULL_BLOCK] * (group.per_page - len(kept))
            hold.table += kept
        hold.table += fresh
        return hold

    def _checkpoints(self, match: Match, tokens: int) -> list[int]:
        """Positions whose states are worth keeping: where others that share the beginning had to stop, and the last
        pages of this text, for those that repeat it and those that go on from it."""
        if not self._device.states or not self._prefix_caching:
            return []
        pages = {match.agreed, (tokens - 1) // self._page, tokens // self._page}
        return sorted(page * self._page for page in pages if page > match.boundary)

    def _tiers(self, chain: Sequence[bytes], boundary: int, found: Sequence[_Found], fetch: Fetch | None) -> TierTokens:
        """Where the hit's tokens came from, told by the first group that keeps all of them, if there is one."""
        tiers = TierTokens()
        group = next((group for group in self._device.groups if group.closed), self._device.groups[0])
        for position in range(boundary):
            each = found[group.index]
            if not group.closed:
                position = boundary - 1
            if position in each.here:
                tiers.l1 += self._page
            elif fetch is not None and (group.index, chain[position]) in fetch.fetched:
                tiers.l3 += self._page
            else:
                tiers.l2 += self._page
        return tiers

    def _count(self, tokens: int, cached: TierTokens) -> None:
        stats = self._stats
        stats.admitted += 1
        stats.prompt_tokens += tokens
        stats.hit_tokens.l1 += cached.l1
        stats.hit_tokens.l2 += cached.l2
        stats.hit_tokens.l3 += cached.l3
        stats.miss_tokens += tokens - cached.total
