"""L1: the device memory of all cached keys, values and states."""

from __future__ import annotations

import math

import torch
from moonpool_api.geometry import DTYPE_BYTES, CacheGeometry, PlaneGeometry

from moonpool_worker.cache.arena_plan import GroupPlan, field_parts, plan_arena

#: Never handed out, in any group: a hole in a block table, the state before the first token. Its bytes are zeros.
NULL_BLOCK = 0

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a cached element; ValueError when it is unknown."""
    try:
        return _DTYPES[name]
    except KeyError:
        raise ValueError(f"cached KV cannot have dtype {name!r}; use one of {sorted(_DTYPES)}") from None


class DeviceArena:
    """``parents`` parents, the null parent included, in one flat tensor ``bytes``; see :mod:`arena_plan`.

    On a CPU the memory is lazily touched: a page costs nothing until its block is first written. RuntimeError when
    the device has too little memory.
    """

    def __init__(self, geometry: CacheGeometry, parents: int, device: torch.device | str = "cpu") -> None:
        if parents < 2:
            raise ValueError(f"L1 needs the null parent and at least one more, got {parents} parents")
        self.geometry = geometry
        self.plan = plan_arena(geometry)
        self.parents = parents
        self.device = torch.device(device)
        self.bytes = torch.empty(parents * self.plan.parent_bytes, dtype=torch.uint8, device=self.device)
        self._views: dict[tuple[int, int, str], torch.Tensor] = {}
        for group in self.plan.groups:
            self._bind(group)
            # Padded rows read the null block: garbage may be NaN, and NaN survives a mask that multiplies.
            for layer in group.geometry.layers:
                for plane in group.geometry.planes:
                    self.view(group.index, layer, plane.name)[NULL_BLOCK].zero_()

    @staticmethod
    def parents_in(geometry: CacheGeometry, size: int) -> int:
        """How many parents, the null parent included, fit in ``size`` bytes."""
        return size // plan_arena(geometry).parent_bytes

    def blocks(self, group: int) -> int:
        """Ids of a group, those in the null parent included."""
        return self.parents * self.plan.groups[group].packing

    def view(self, group: int, layer: int, plane: str) -> torch.Tensor:
        """One plane of one layer, by block: ``[blocks, rows, *row]`` (history) or ``[blocks, *shape]`` (state).

        ``layer`` is the model's number of the layer. KeyError when the group has no such layer or plane.
        """
        return self._views[group, layer, plane]

    def fields(self, group: int) -> torch.Tensor:
        """All bytes of a group's blocks, uint8 ``[fields, blocks, field_bytes]``: what is copied to another tier."""
        plan = self.plan.groups[group]
        region = plan.spread * self.parents * self.plan.width
        shape = (plan.fields, self.blocks(group), plan.field_bytes)
        return self.bytes.as_strided(shape, (region, self.plan.width // plan.per_slice, 1))

    def parent_of(self, group: int, block: int) -> int:
        return self.plan.parent_of(group, block, self.parents)

    @property
    def nbytes(self) -> int:
        return self.parents * self.plan.parent_bytes

    def _bind(self, group: GroupPlan) -> None:
        geometry = group.geometry
        planes = {plane.name: plane for plane in geometry.planes}
        region = group.spread * self.parents * self.plan.width
        number = 0
        for layer in geometry.layers:
            for field in field_parts(geometry):
                for name, offset in field:
                    self._views[group.index, layer, name] = self._typed(group, planes[name], number * region + offset)
                number += 1

    def _typed(self, group: GroupPlan, plane: PlaneGeometry, start: int) -> torch.Tensor:
        itemsize = DTYPE_BYTES[plane.dtype]
        stride = self.plan.width // group.per_slice // itemsize
        shape = plane.shape if group.geometry.family == "state" else (group.geometry.rows, *plane.shape)
        inner = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
        typed = self.bytes.view(torch_dtype(plane.dtype))
        return typed.as_strided((self.blocks(group.index), *shape), (stride, *inner), start // itemsize)
