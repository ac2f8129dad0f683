"""L1: the tables of requests, and the pages that are cached in the same blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from moonpool_worker.cache.allocation import Allocation, Hold
from moonpool_worker.cache.arena_tiling import ArenaTiling
from moonpool_worker.cache.block_pool import BlockPool
from moonpool_worker.cache.cache_group import CacheGroup, Retention, cache_groups
from moonpool_worker.cache.device_arena import NULL_BLOCK, DeviceArena
from moonpool_worker.cache.prefix_index import Clock, Node


class DeviceTier:
    """Blocks of ``arena`` for the tables of all groups. What it does not know: tokens, other tiers, requests.

    Every change is one transaction: it is counted first what all groups need, and taken for all or for none.
    """

    def __init__(self, arena: DeviceArena, on_evict: Callable[[Node], None], clock: Clock | None = None) -> None:
        self.groups = cache_groups(arena.geometry)
        self.page = arena.geometry.prefix_granularity
        tiling = ArenaTiling(arena.plan, arena.parents)
        self.pool = BlockPool(
            tiling, [group.closed for group in self.groups], NULL_BLOCK + 1, arena.parents - 1, on_evict, clock
        )
        self.history = [group for group in self.groups if group.retention is not Retention.STATE]
        self.states = [group for group in self.groups if group.retention is Retention.STATE]
        self.windows = [group for group in self.groups if group.retention is Retention.WINDOW]

    # -- sizes -------------------------------------------------------------------------------------------------

    def alone(self, tokens: int, chunk: int) -> list[int]:
        """Blocks of every group that one text of ``tokens`` tokens needs, computed ``chunk`` tokens at a time."""
        return [self._alone(group, tokens, chunk) for group in self.groups]

    def _alone(self, group: CacheGroup, tokens: int, chunk: int) -> int:
        if group.retention is Retention.STATE:
            # The checkpoint that it begins with, and the state that it writes.
            return 2
        window = group.geometry.window
        if window is None:
            return group.blocks_for(tokens)
        # A window that begins and ends inside a page, and a chunk that does: the pages they touch.
        return min(group.blocks_for(tokens), group.blocks_for(window - 1 + chunk) + 2 * group.per_page)

    def with_spare(self, demand: Sequence[int], spare: int) -> list[int]:
        """The demand, and ``spare`` blocks more of every group whose tables grow with a text."""
        more = list(demand)
        for group in self.history:
            more[group.index] += spare
        return more

    # -- looking -----------------------------------------------------------------------------------------------

    def longest(self, group: CacheGroup, chain: Sequence[bytes], pages: int) -> int:
        """How many leading pages a closed group has: found by halving, as no ancestor of a resident page is missing."""
        get = self.pool.index(group.index).get
        low, high = 0, pages
        while low < high:
            middle = (low + high) // 2
            if get(chain[middle]) is None:
                high = middle
            else:
                low = middle + 1
        return low

    # -- growing -----------------------------------------------------------------------------------------------

    def extend(self, allocation: Allocation, tokens: int, checkpoints: bool) -> bool:
        """Room for the tokens from ``allocation.computed`` to ``tokens``: True, or False and nothing taken.

        Blocks that a window has passed are given back; wanted states on the way get a block each if there is one.
        """
        self._pass_windows(allocation)
        positions = [at for at in allocation.wanted if allocation.computed < at <= tokens] if checkpoints else []
        demand = self._demand(allocation, tokens, positions)
        if not self.pool.feasible(demand):
            if not positions:
                return False
            # Checkpoints spare others work; they must never stop this text.
            positions = []
            demand = self._demand(allocation, tokens, positions)
            if not self.pool.feasible(demand):
                return False
        after = [hold.table[-1] if hold.table and hold.table[-1] else None for hold in allocation.holds]
        taken = self.pool.take(demand, after)
        for group in self.history:
            allocation.holds[group.index].table += taken[group.index]
        for group in self.states:
            hold, blocks = allocation.holds[group.index], taken[group.index]
            for at in positions:
                if at not in hold.checkpoints:
                    hold.checkpoints[at] = blocks.pop()
            if not hold.live:
                hold.live = blocks.pop()
        allocation.wanted = [at for at in allocation.wanted if at > tokens]
        allocation.room = self._room(allocation)
        return True

    def _demand(self, allocation: Allocation, tokens: int, positions: Sequence[int]) -> list[int]:
        demand = [0] * len(self.groups)
        for group in self.history:
            demand[group.index] = max(0, group.blocks_for(tokens) - len(allocation.holds[group.index].table))
        for group in self.states:
            hold = allocation.holds[group.index]
            demand[group.index] = (not hold.live) + sum(at not in hold.checkpoints for at in positions)
        return demand

    def _room(self, allocation: Allocation) -> int:
        room = min(
            (len(allocation.holds[group.index].table) * group.geometry.block_tokens for group in self.history),
            default=1 << 62,
        )
        if allocation.wanted:
            room = min(room, allocation.wanted[0] - 1)
        return room

    def settle(self, allocation: Allocation) -> None:
        """The tables were just made: find from which token on :meth:`extend` has something to do."""
        allocation.room = self._room(allocation)

    def _pass_windows(self, allocation: Allocation) -> None:
        for group in self.windows:
            hold = allocation.holds[group.index]
            passed = min(group.passed(allocation.computed), len(hold.table))
            for at in range(hold.passed, passed):
                self._let_pass(group, hold, at)
            hold.passed = max(hold.passed, passed)

    def _let_pass(self, group: CacheGroup, hold: Hold, at: int) -> None:
        page, block = at // group.per_page, hold.table[at]
        hold.table[at] = NULL_BLOCK
        node = hold.nodes[page] if page < len(hold.nodes) else None
        if block and (node is None or block not in node.blocks):
            self.pool.give(group.index, (block,))
        if node is not None and at % group.per_page == group.per_page - 1:
            hold.nodes[page] = None
            self.pool.unref(node)

    # -- publishing --------------------------------------------------------------------------------------------

    def publish(self, allocation: Allocation, chain: Sequence[bytes], computed: int) -> tuple[list[Node], int]:
        """Pages complete up to ``computed`` tokens join the index: the new nodes, and how many were there already.

        A page that another request published meanwhile stays a private copy here, and the resident one is held so that
        its continuation is never without it. Pointing the table to the resident one would save its memory until this
        request ends, but tear the text's consecutive blocks apart and change its bits half-way.
        """
        fresh: list[Node] = []
        duplicates = 0
        pages = min(computed // self.page, len(chain))
        for group in self.history:
            hold = allocation.holds[group.index]
            for page in range(allocation.published, pages):
                node, new = self._publish_page(group, hold, chain, page)
                hold.nodes.append(node)
                if new:
                    assert node is not None
                    fresh.append(node)
                duplicates += not new
        allocation.published = max(allocation.published, pages)
        return fresh, duplicates

    def _publish_page(
        self, group: CacheGroup, hold: Hold, chain: Sequence[bytes], page: int
    ) -> tuple[Node | None, bool]:
        resident = self.pool.get(group.index, chain[page])
        if resident is not None:
            if not group.closed:
                return None, False
            self.pool.ref(resident)
            return resident, False
        end = (page + 1) * group.per_page
        blocks = tuple(hold.table[end - group.kept : end])
        parent = chain[page - 1] if page else None
        return self.pool.insert(group.index, chain[page], parent, page, blocks, refs=1), True

    def advance(self, allocation: Allocation, chain: Sequence[bytes], computed: int) -> tuple[list[Node], int]:
        """The tokens up to ``computed`` are in their blocks: states move on, checkpoints on the way join the index."""
        allocation.computed = computed
        fresh: list[Node] = []
        duplicates = 0
        for group in self.states:
            hold = allocation.holds[group.index]
            hold.source = hold.live
            if hold.origin is not None:
                self.pool.unref(hold.origin)
                hold.origin = None
            for at in [at for at in hold.checkpoints if at <= computed]:
                block, page = hold.checkpoints.pop(at), at // self.page - 1
                if page >= len(chain) or self.pool.get(group.index, chain[page]) is not None:
                    self.pool.give(group.index, (block,))
                    duplicates += 1
                    continue
                parent = chain[page - 1] if page else None
                fresh.append(self.pool.insert(group.index, chain[page], parent, page, (block,)))
        return fresh, duplicates

    # -- letting go --------------------------------------------------------------------------------------------

    def free(self, allocation: Allocation) -> None:
        """Give everything back; published pages stay cached."""
        held = [node for hold in allocation.holds for node in (*hold.nodes, hold.origin) if node is not None]
        self.pool.touch(held)
        for group, hold in zip(self.groups, allocation.holds, strict=True):
            self._free_hold(group, hold)

    def _free_hold(self, group: CacheGroup, hold: Hold) -> None:
        private = []
        for at in range(hold.passed, len(hold.table)):
            page, block = at // group.per_page, hold.table[at]
            node = hold.nodes[page] if page < len(hold.nodes) else None
            if block and (node is None or block not in node.blocks):
                private.append(block)
        self.pool.give(group.index, private)
        for node in reversed(hold.nodes):
            if node is not None:
                self.pool.unref(node)
        if hold.origin is not None:
            self.pool.unref(hold.origin)
        self.pool.give(group.index, [block for block in (hold.live, *hold.checkpoints.values()) if block])
        hold.table.clear()
        hold.nodes.clear()
        hold.checkpoints.clear()
        hold.passed, hold.live, hold.source, hold.origin = 0, 0, 0, None
