"""L1's blocks: free, held by requests, or held by the prefix index alone (evictable)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from moonpool_worker.cache.device_arena import NULL_BLOCK
from moonpool_worker.cache.free_runs import FreeRuns
from moonpool_worker.cache.prefix_index import Node, PrefixIndex


class BlockPool:
    """Blocks ``1 .. num_blocks - 1``, and the index of those that hold a published prefix.

    Requests refer to whole prefixes: whoever holds a node holds its ancestors too. So every unreferenced node can be
    reached leaf by leaf, and ``available`` is exact.

    ``on_evict(node)`` is called before a block is reused, while its bytes are still there.
    """

    def __init__(self, num_blocks: int, on_evict: Callable[[Node], None]) -> None:
        self.num_blocks = num_blocks
        self._free = FreeRuns(NULL_BLOCK + 1, num_blocks - 1)
        self._on_evict = on_evict
        self.index = PrefixIndex(self._release)
        self.evictions = 0

    @property
    def available(self) -> int:
        """Blocks that can be taken now: free ones and evictable ones."""
        return len(self._free) + self.index.unreferenced

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    @property
    def usable_blocks(self) -> int:
        """All blocks but the null block."""
        return self.num_blocks - 1

    def take(self, count: int, after: int | None = None) -> list[int]:
        """``count`` private blocks, evicting as needed; ValueError when more than ``available``."""
        if count > self.available:
            raise ValueError(f"{count} blocks wanted, {self.available} are available")
        while len(self._free) < count:
            victim = self.index.victim()
            assert victim is not None, "an unreferenced block has a referenced or unknown continuation"
            self._on_evict(victim)
            self.evictions += 1
            self.index.remove(victim)
        return self._free.take(count, after)

    def give(self, blocks: Sequence[int]) -> None:
        """Return private blocks."""
        self._free.give(blocks)

    def _release(self, node: Node) -> None:
        self._free.give((node.slot,))
