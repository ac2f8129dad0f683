"""A request that had to make room goes to L2 and comes back as it was, instead of being computed again.

Its published pages are in L2 already, by write-through: they are pinned there. What nobody else may see, the tail
of the text, private copies and the live state, is copied to private slots, which are never found by anybody.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from moonpool_worker.cache.allocation import Allocation, Hold
from moonpool_worker.cache.cache_group import CacheGroup, Retention
from moonpool_worker.cache.device_arena import NULL_BLOCK
from moonpool_worker.cache.device_tier import DeviceTier
from moonpool_worker.cache.host_tier import HostTier
from moonpool_worker.cache.prefix_index import Node
from moonpool_worker.cache.stats import CacheStats, TierTokens
from moonpool_worker.cache.tier_copies import TierCopies


@dataclass(slots=True)
class _Part:
    """One group's part. ``pages``: pinned L2 nodes by page; ``links``: (link, the one before it) of every page that
    was held; ``blocks``: places in the table, in order, whose contents are in the private ``slots``."""

    pages: dict[int, Node] = field(default_factory=dict)
    links: dict[int, tuple[bytes, bytes | None]] = field(default_factory=dict)
    blocks: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    passed: int = 0


@dataclass(slots=True, eq=False)
class Suspended:
    """A request's cache in L2. ``lost``: a part of it turned out to be damaged, and it cannot come back."""

    computed: int
    published: int
    cached_tokens: int
    cached: TierTokens
    wanted: list[int]
    parts: list[_Part]
    lost: bool = False


@dataclass(slots=True)
class _Plan:
    """How a group's table will look: nodes that L1 has, places that need a block, pages to be copied from L2."""

    here: dict[int, Node]
    fresh: list[int]
    below: dict[int, Node]
    length: int


class Suspension:
    """Moves allocations between L1 and L2. Everything or nothing, as in :mod:`admission`."""

    def __init__(self, device: DeviceTier, host: HostTier | None, copies: TierCopies, stats: CacheStats) -> None:
        self._device = device
        self._pool = device.pool
        self._host = host
        self._copies = copies
        self._stats = stats

    # -- out ---------------------------------------------------------------------------------------------------

    def suspend(self, allocation: Allocation) -> Suspended | None:
        host = self._host
        if host is None or not host.retain or allocation.computed <= allocation.cached_tokens:
            # What was only taken from the cache is found there again.
            return None
        wanted = {at for hold in allocation.holds for at in hold.checkpoints} | set(allocation.wanted)
        suspended = Suspended(
            allocation.computed,
            allocation.published,
            allocation.cached_tokens,
            allocation.cached,
            sorted(wanted),
            [_Part() for _ in allocation.holds],
        )
        for group, hold, part in zip(self._device.groups, allocation.holds, suspended.parts, strict=True):
            if not self._save(group, hold, part, allocation.computed):
                self.drop(suspended)
                return None
        self._device.free(allocation)
        allocation.freed = True
        self._stats.suspended += 1
        return suspended

    def _save(self, group: CacheGroup, hold: Hold, part: _Part, computed: int) -> bool:
        host = self._host
        assert host is not None
        part.passed = hold.passed
        nodes: dict[int, Node] = {}
        for page, node in enumerate(hold.nodes):
            if node is not None:
                part.links[page] = node.digest, node.parent
                if all(block in node.blocks for block in self._kept(group, hold, page) if block):
                    nodes[page] = node
        if not self._pin(group, nodes, part):
            return False
        if group.retention is Retention.STATE:
            blocks = [hold.live]
        else:
            shared = {block for node in nodes.values() for block in node.blocks}
            stop = min(len(hold.table), group.blocks_for(computed))
            part.blocks = [at for at in range(hold.passed, stop) if hold.table[at] and hold.table[at] not in shared]
            blocks = [hold.table[at] for at in part.blocks]
        slots = host.save(group.index, blocks)
        part.slots = slots or []
        return slots is not None

    @staticmethod
    def _kept(group: CacheGroup, hold: Hold, page: int) -> Sequence[int]:
        end = (page + 1) * group.per_page
        return hold.table[end - group.kept : end]

    def _pin(self, group: CacheGroup, nodes: dict[int, Node], part: _Part) -> bool:
        """Hold L2's copies of these pages, making those that it lacks."""
        host = self._host
        assert host is not None
        for page, node in nodes.items():
            copy = host.index.get(group.index, node.digest)
            if copy is not None and self._copies.is_good(copy):
                host.index.ref(copy)
                part.pages[page] = copy
        missing = {node.digest: page for page, node in nodes.items() if page not in part.pages}
        for copy in self._copies.down([nodes[page] for page in missing.values()]):
            part.pages[missing[copy.digest]] = copy
        return len(part.pages) == len(nodes)

    def drop(self, suspended: Suspended) -> None:
        host = self._host
        assert host is not None
        for group, part in zip(self._device.groups, suspended.parts, strict=True):
            for copy in part.pages.values():
                host.release(copy)
            host.discard(group.index, part.slots)
            part.pages, part.slots, part.blocks = {}, [], []

    # -- in ----------------------------------------------------------------------------------------------------

    def resume(self, suspended: Suspended, tokens: int, chunk: int, spare: int) -> Allocation | None:
        plans = [
            self._plan(group, part, suspended, tokens, chunk)
            for group, part in zip(self._device.groups, suspended.parts, strict=True)
        ]
        for plan in plans:
            for node in plan.here.values():
                self._pool.ref(node)
        demand = [len(plan.fresh) for plan in plans]
        if not self._pool.feasible(self._device.with_spare(demand, spare)):
            self._let_go(plans)
            self._stats.refused += 1
            return None
        after = [None if not plan.here else plan.here[max(plan.here)].blocks[-1] for plan in plans]
        taken = self._pool.take(demand, after)
        places = [dict(zip(plan.fresh, blocks, strict=True)) for plan, blocks in zip(plans, taken, strict=True)]
        if not self._bring(suspended, plans, places):
            for group, blocks in enumerate(taken):
                self._pool.give(group, blocks)
            self._let_go(plans)
            suspended.lost = True
            return None
        holds = [
            self._hold(group, part, plan, place, suspended.published)
            for group, part, plan, place in zip(self._device.groups, suspended.parts, plans, places, strict=True)
        ]
        allocation = Allocation(
            holds, suspended.cached_tokens, suspended.cached, suspended.computed, suspended.published, suspended.wanted
        )
        self._pool.touch([node for hold in holds for node in hold.nodes if node is not None])
        self._device.settle(allocation)
        self.drop(suspended)
        self._stats.resumed += 1
        return allocation

    def _let_go(self, plans: Sequence[_Plan]) -> None:
        for plan in plans:
            for node in reversed(plan.here.values()):
                self._pool.unref(node)

    def _plan(self, group: CacheGroup, part: _Part, suspended: Suspended, tokens: int, chunk: int) -> _Plan:
        if group.retention is Retention.STATE:
            return _Plan({}, [0], {}, 0)
        upto = tokens if group.closed else min(tokens, suspended.computed + chunk)
        length = max(group.blocks_for(upto), group.blocks_for(suspended.computed))
        here: dict[int, Node] = {}
        below: dict[int, Node] = {}
        fresh = set(part.blocks) | set(range(group.blocks_for(suspended.computed), length))
        for page, (link, _) in sorted(part.links.items()):
            node = self._pool.get(group.index, link)
            if node is not None:
                here[page] = node
            elif page in part.pages:
                below[page] = part.pages[page]
                end = (page + 1) * group.per_page
                fresh.update(range(end - group.kept, end))
        return _Plan(here, sorted(fresh), below, length)

    def _bring(self, suspended: Suspended, plans: Sequence[_Plan], places: Sequence[dict[int, int]]) -> bool:
        host = self._host
        assert host is not None
        for group, part, plan, place in zip(self._device.groups, suspended.parts, plans, places, strict=True):
            pages = [self._blocks_of(group, page, place) for page in plan.below]
            if plan.below and self._copies.up(list(plan.below.values()), pages) is not None:
                return False
            blocks = [place[0]] if group.retention is Retention.STATE else [place[at] for at in part.blocks]
            host.bring(group.index, part.slots, blocks)
        return True

    @staticmethod
    def _blocks_of(group: CacheGroup, page: int, place: dict[int, int]) -> tuple[int, ...]:
        end = (page + 1) * group.per_page
        return tuple(place[at] for at in range(end - group.kept, end))

    def _hold(self, group: CacheGroup, part: _Part, plan: _Plan, place: dict[int, int], published: int) -> Hold:
        if group.retention is Retention.STATE:
            return Hold(live=place[0], source=place[0])
        table = [place.get(at, NULL_BLOCK) for at in range(plan.length)]
        nodes: list[Node | None] = [None] * published
        arrived = []
        for page, (link, parent) in sorted(part.links.items()):
            end = (page + 1) * group.per_page
            if page in plan.here:
                node = plan.here[page]
                if page in part.pages:
                    table[end - group.kept : end] = node.blocks
            elif group.closed or page in plan.below:
                # A private copy of a page that is gone from L1 takes its place there.
                node = self._pool.insert(group.index, link, parent, page, self._blocks_of(group, page, place), refs=1)
                arrived.append(node)
            else:
                continue
            nodes[page] = node
        self._copies.arrived(arrived)
        for at in range(part.passed):
            table[at] = NULL_BLOCK
        return Hold(table=table, nodes=nodes, passed=part.passed)
