"""How the blocks of the device arena lie in its parents, for the pool."""

from __future__ import annotations

from moonpool_worker.cache.arena_plan import ArenaPlan


class ArenaTiling:
    """The numbering of :mod:`arena_plan`, in an arena of ``parents`` parents, the null parent included."""

    def __init__(self, plan: ArenaPlan, parents: int) -> None:
        self._plan = plan
        self._parents = parents
        self.packing = tuple(group.packing for group in plan.groups)
        self._per_slice = tuple(group.per_slice for group in plan.groups)

    def parent_of(self, group: int, block: int) -> int:
        return block // self._per_slice[group] % self._parents

    def blocks_of(self, group: int, parent: int) -> list[int]:
        """In ascending order."""
        return self._plan.blocks_of(group, parent, self._parents)
