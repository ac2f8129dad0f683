"""How the slots of all groups tile L2.

L2 is cut into host parents of one size. A parent belongs to one group at a time and holds as many of its slots as fit,
one after another::

    offset of slot s of group g = s // slots[g] * parent_bytes + s % slots[g] * stride[g]

A slot is a header and one page of the group: for each of its fields (K of layer 3, V of layer 3 …) the blocks of the
page that are kept, one after another, ``[fields, kept, field_bytes]``. With one group a parent is a slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moonpool_worker.cache.arena_plan import ArenaPlan
from moonpool_worker.cache.block_header import HEADER_BYTES
from moonpool_worker.cache.cache_group import CacheGroup

#: Slots start on a memory page.
SLOT_ALIGNMENT = 4096
#: A parent has room for at most so many of the largest slots; more would bind more memory to one group at a time.
_MOST = 8


@dataclass(frozen=True, slots=True)
class SlotShape:
    """One group's page in L2: ``payload`` is ``[fields, kept, field_bytes]``."""

    fields: int
    kept: int
    field_bytes: int
    stride: int

    @property
    def payload_bytes(self) -> int:
        return self.fields * self.kept * self.field_bytes


class HostLayout:
    """Slots of every group in ``size // parent_bytes`` parents; a tiling for the pool."""

    def __init__(
        self, plan: ArenaPlan, groups: Sequence[CacheGroup], size: int, alignment: int = SLOT_ALIGNMENT
    ) -> None:
        self.shapes = tuple(
            _shape(group.fields, kept.kept, group.field_bytes, alignment)
            for group, kept in zip(plan.groups, groups, strict=True)
        )
        strides = [shape.stride for shape in self.shapes]
        largest = max(strides)
        sizes = (largest * count for count in range(1, _MOST + 1))
        self.parent_bytes = min(sizes, key=lambda size: _waste(size, strides))
        self.packing = tuple(self.parent_bytes // stride for stride in strides)
        self.parents = size // self.parent_bytes

    def offset(self, group: int, slot: int) -> int:
        """Byte offset of a slot's header."""
        parent, place = divmod(slot, self.packing[group])
        return parent * self.parent_bytes + place * self.shapes[group].stride

    def object_bytes(self, group: int) -> int:
        """Header and payload."""
        return HEADER_BYTES + self.shapes[group].payload_bytes

    def parent_of(self, group: int, slot: int) -> int:
        return slot // self.packing[group]

    def blocks_of(self, group: int, parent: int) -> list[int]:
        packing = self.packing[group]
        return list(range(parent * packing, (parent + 1) * packing))


def _shape(fields: int, kept: int, field_bytes: int, alignment: int) -> SlotShape:
    used = HEADER_BYTES + fields * kept * field_bytes
    return SlotShape(fields, kept, field_bytes, -(-used // alignment) * alignment)


def _waste(parent_bytes: int, strides: Sequence[int]) -> tuple[float, int]:
    return max(1 - parent_bytes // stride * stride / parent_bytes for stride in strides), parent_bytes
