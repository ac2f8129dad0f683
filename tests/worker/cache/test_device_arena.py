"""The arena: every group's blocks tile its parents, and no two blocks of different parents share a byte."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from moonpool_api.geometry import CacheGeometry, GroupGeometry, PlaneGeometry
from moonpool_worker.cache.arena_plan import plan_arena
from moonpool_worker.cache.device_arena import NULL_BLOCK, DeviceArena

P = 16


def history(name: str, layers: range, row: int, block: int = P, stride: int = 1, planes: int = 2) -> GroupGeometry:
    return GroupGeometry(
        name=name,
        block_tokens=block,
        stride=stride,
        layers=tuple(layers),
        planes=tuple(PlaneGeometry(name=f"p{i}", shape=(row,), dtype="float32") for i in range(planes)),
    )


def state(name: str, layers: range, conv: int, recurrent: int) -> GroupGeometry:
    planes = (
        PlaneGeometry(name="conv", shape=(conv, 3), dtype="bfloat16"),
        PlaneGeometry(name="recurrent", shape=(recurrent, 4, 4), dtype="float32"),
    )
    return GroupGeometry(name=name, family="state", block_tokens=P, layers=tuple(layers), planes=planes)


@st.composite
def geometries(draw: st.DrawFn) -> CacheGeometry:
    groups = []
    for index in range(draw(st.integers(1, 3))):
        layers = range(draw(st.integers(1, 5)))
        if draw(st.booleans()):
            row, block = draw(st.integers(1, 40)), draw(st.sampled_from([4, 8, 16]))
            stride, planes = draw(st.sampled_from([1, 4])), draw(st.integers(1, 3))
            groups.append(history(f"g{index}", layers, row, block, stride, planes))
        else:
            groups.append(state(f"g{index}", layers, draw(st.integers(1, 20)), draw(st.integers(1, 8))))
    return CacheGeometry(prefix_granularity=P, groups=tuple(groups))


@pytest.mark.property
@settings(max_examples=60, deadline=None)
@given(geometry=geometries(), parents=st.integers(2, 4))
def test_a_byte_belongs_to_one_block_of_a_group_and_to_one_parent(geometry: CacheGeometry, parents: int) -> None:
    arena = DeviceArena(geometry, parents)
    owner = torch.full((arena.nbytes,), -1, dtype=torch.int64)
    for group in arena.plan.groups:
        seen = torch.zeros(arena.nbytes, dtype=torch.int64)
        assert sorted(block for p in range(parents) for block in arena.plan.blocks_of(group.index, p, parents)) == list(
            range(arena.blocks(group.index))
        )
        for block in range(arena.blocks(group.index)):
            parent = arena.parent_of(group.index, block)
            arena.bytes.zero_()
            for layer in group.geometry.layers:
                for plane in group.geometry.planes:
                    arena.view(group.index, layer, plane.name)[block].view(torch.uint8).fill_(1)
            mine = arena.bytes.bool()
            assert int(mine.sum()) == group.geometry.bytes_per_block
            seen += mine
            assert bool(((owner[mine] == -1) | (owner[mine] == parent)).all())
            owner[mine] = parent
            # What is copied to another tier holds all of it.
            whole = arena.fields(group.index)[:, block]
            assert int(whole.sum()) == group.geometry.bytes_per_block
            assert whole.numel() == group.payload_bytes
        assert int(seen.max()) == 1


@pytest.mark.property
@settings(max_examples=100, deadline=None)
@given(geometry=geometries())
def test_every_group_has_a_block_in_a_parent(geometry: CacheGeometry) -> None:
    plan = plan_arena(geometry)
    assert all(group.packing >= 1 for group in plan.groups)
    assert all(0 <= plan.waste(group.index) < 1 for group in plan.groups)


def test_one_group_wastes_nothing_and_numbers_its_blocks_as_parents() -> None:
    geometry = CacheGeometry(prefix_granularity=P, groups=(history("full", range(30), 192),))
    arena = DeviceArena(geometry, 5)
    assert arena.plan.waste(0) == 0
    assert [arena.parent_of(0, block) for block in range(arena.blocks(0))] == [0, 1, 2, 3, 4]
    keys = arena.view(0, 3, "p0")
    assert keys.shape == (5, P, 192)
    assert keys.is_contiguous()


def test_a_hybrid_of_five_window_layers_for_each_full_one_wastes_nothing() -> None:
    # Gemma 3: 15 layers with a window, 3 without, rows of one size.
    groups = (history("full", range(3), 256), history("window", range(15), 256))
    arena = DeviceArena(CacheGeometry(prefix_granularity=P, groups=groups), 3)
    assert [group.packing for group in arena.plan.groups] == [5, 1]
    assert [arena.plan.waste(index) for index in (0, 1)] == [0, 0]


def test_the_null_block_of_every_group_is_zeros() -> None:
    groups = (history("full", range(2), 24), state("state", range(3), 8, 2))
    arena = DeviceArena(CacheGeometry(prefix_granularity=P, groups=groups), 3)
    for group in arena.plan.groups:
        assert arena.parent_of(group.index, NULL_BLOCK) == 0
        for layer in group.geometry.layers:
            for plane in group.geometry.planes:
                assert not arena.view(group.index, layer, plane.name)[NULL_BLOCK].any()
