"""How the blocks of all cache groups tile one arena.

The arena is cut into *parents* of one size, and a parent belongs to one group at a time, so groups of any shape share
the memory without a split that was fixed beforehand. It is laid out plane by plane, not parent by parent::

    arena = [planes][parents][width]        a parent = its slice of every plane

A group puts each of its *fields* (K of layer 3, V of layer 3, the state of layer 7) into a plane's slice, several
children beside one another where the field is smaller than ``width``, and several children in different planes where
the group has fewer fields than there are planes. The ids are numbered so that each field is one dense tensor over all
of its group's blocks, and neighbours by id are neighbours in memory::

    id = (plane of the child * parents + parent) * per_slice + place in the slice

With one group, an id is the parent's number. The idea of parents that every group tiles is TokenSpeed's (2026).
"""

from __future__ import annotations

from dataclasses import dataclass

from moonpool_api.geometry import CacheGeometry, GroupGeometry

#: Slices and fields start at multiples of this many bytes: a cache line, and what vector loads like.
ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """Group ``index``: a parent holds ``packing`` blocks; field ``f`` has ``spread`` planes from ``f * spread`` on."""

    index: int
    geometry: GroupGeometry
    field_bytes: int
    fields: int
    spread: int
    per_slice: int

    @property
    def packing(self) -> int:
        return self.spread * self.per_slice

    @property
    def payload_bytes(self) -> int:
        """Bytes of one block in another tier: its fields, one after another."""
        return self.fields * self.field_bytes


@dataclass(frozen=True, slots=True)
class ArenaPlan:
    """``planes`` of ``width`` bytes per parent."""

    geometry: CacheGeometry
    planes: int
    width: int
    groups: tuple[GroupPlan, ...]

    @property
    def parent_bytes(self) -> int:
        return self.planes * self.width

    def parent_of(self, group: int, block: int, parents: int) -> int:
        """The parent of a group's block, in an arena of ``parents``."""
        return block // self.groups[group].per_slice % parents

    def blocks_of(self, group: int, parent: int, parents: int) -> list[int]:
        """All blocks of a group in one parent, neighbours first."""
        plan = self.groups[group]
        return [
            (plane * parents + parent) * plan.per_slice + place
            for plane in range(plan.spread)
            for place in range(plan.per_slice)
        ]

    def waste(self, group: int) -> float:
        """The share of a parent that a group's blocks leave unused."""
        plan = self.groups[group]
        return 1 - plan.packing * plan.geometry.bytes_per_block / self.parent_bytes


def field_parts(group: GroupGeometry) -> list[list[tuple[str, int]]]:
    """The fields of one layer, each a list of (plane, byte offset in it).

    Each plane of a history group is a field, so that its rows are dense. All planes of a state group are one field: a
    small convolution state beside a large recurrent one would waste a slice.
    """
    if group.family == "history":
        return [[(plane.name, 0)] for plane in group.planes]
    parts, offset = [], 0
    for plane in group.planes:
        parts.append((plane.name, offset))
        offset += _aligned(plane.nbytes)
    return [parts]


def plan_arena(geometry: CacheGeometry) -> ArenaPlan:
    """The tiling with the least waste among the few that are tried; one group wastes nothing but alignment."""
    sizes = [_aligned(_field_bytes(group)) for group in geometry.groups]
    fields = [len(group.layers) * len(field_parts(group)) for group in geometry.groups]
    candidates = (
        [(planes, width) for planes in range(max(fields), 4 * max(fields) + 1) for width in _widths(sizes)]
        if len(geometry.groups) > 1
        else [(fields[0], sizes[0])]
    )
    best = min(candidates, key=lambda candidate: (_worst_waste(candidate, geometry, sizes, fields), *candidate))
    planes, width = best
    groups = tuple(
        GroupPlan(index, group, size, count, planes // count, _per_slice(width, size))
        for index, (group, size, count) in enumerate(zip(geometry.groups, sizes, fields, strict=True))
    )
    return ArenaPlan(geometry, planes, width, groups)


def _field_bytes(group: GroupGeometry) -> int:
    if group.family == "state":
        return sum(_aligned(plane.nbytes) for plane in group.planes)
    return group.rows * max(plane.nbytes for plane in group.planes)


def _widths(sizes: list[int]) -> list[int]:
    largest = max(sizes)
    fitting = {-(-largest // size) * size for size in sizes}
    return sorted({largest, *fitting})


def _per_slice(width: int, size: int) -> int:
    """How many fields of ``size`` share a slice: they tile it exactly, so that ids stay affine."""
    units = width // ALIGNMENT
    count = width // size
    while units % count:
        count -= 1
    return count


def _worst_waste(candidate: tuple[int, int], geometry: CacheGeometry, sizes: list[int], fields: list[int]) -> float:
    planes, width = candidate
    return max(
        1 - (planes // count) * _per_slice(width, size) * group.bytes_per_block / (planes * width)
        for group, size, count in zip(geometry.groups, sizes, fields, strict=True)
    )


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
