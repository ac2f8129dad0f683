"""The block copy in the interpreter: what is copied, where to, and what is left alone."""

from __future__ import annotations

import random

import pytest
import torch
from moonpool_api.geometry import CacheGeometry, GroupGeometry, PlaneGeometry
from moonpool_worker.cache.device_arena import DeviceArena
from moonpool_worker.kernels.triton import block_copy
from moonpool_worker.kernels.triton.block_copy import BlockCopy, Move

pytestmark = pytest.mark.interpreter

HEADER = 128
KEPT = (2, 1)


def geometry() -> CacheGeometry:
    """Rows of layers 0, 2 and 3, two blocks a page; states of layers 1 and 2, whose fields are larger than a part."""
    row = (2, 40)
    return CacheGeometry(
        prefix_granularity=16,
        groups=(
            GroupGeometry(
                name="rows",
                block_tokens=8,
                layers=(0, 2, 3),
                planes=tuple(PlaneGeometry(name=name, shape=row, dtype="float16") for name in "kv"),
            ),
            GroupGeometry(
                name="states",
                family="state",
                block_tokens=16,
                layers=(1, 2),
                planes=(
                    PlaneGeometry(name="conv", shape=(24, 3), dtype="float16"),
                    PlaneGeometry(name="recurrent", shape=(2, 24, 24), dtype="float32"),
                ),
            ),
        ),
    )


@pytest.fixture
def arena() -> DeviceArena:
    arena = DeviceArena(geometry(), 6)
    torch.manual_seed(0)
    arena.bytes.random_(0, 256)
    return arena


def pages(arena: DeviceArena) -> tuple[torch.Tensor, list[list[int]], list[Move], list[tuple[int, int]]]:
    """Host memory, where pages begin in it by group, moves of some blocks of both groups, and the pages they fill:
    (group, page)."""
    sizes = [plan.payload_bytes * kept for plan, kept in zip(arena.plan.groups, KEPT, strict=True)]
    begins, end = [], 0
    for size in sizes:
        begins.append([end + page * (size + HEADER) + HEADER for page in range(3)])
        end = begins[-1][-1] + size
    host = torch.zeros(end + HEADER, dtype=torch.uint8)
    # Parents 1, 2 and 3 are group 0's, 4 and 5 group 1's: their blocks do not overlap.
    blocks = [
        [b for parent in parents for b in arena.plan.blocks_of(group, parent, arena.parents)]
        for group, parents in ((0, (1, 2, 3)), (1, (4, 5)))
    ]
    draw = random.Random(1)
    moves, filled = [], []
    for group, kept in enumerate(KEPT):
        draw.shuffle(blocks[group])
        for page in (0, 2):
            filled.append((group, page))
            for place in range(kept):
                offset = begins[group][page] + place * arena.plan.groups[group].field_bytes
                moves.append(Move(group, blocks[group].pop(), offset))
    draw.shuffle(moves)
    return host, begins, moves, filled


def expected_host(arena: DeviceArena, host: torch.Tensor, moves: list[Move]) -> torch.Tensor:
    expected = host.clone()
    for group, block, offset in moves:
        fields = arena.fields(group)
        size = fields.shape[2]
        for number in range(fields.shape[0]):
            begin = offset + number * KEPT[group] * size
            expected[begin : begin + size] = fields[number, block]
    return expected


@pytest.mark.parametrize("programs", [1, 3, 64])
def test_there_and_back(arena: DeviceArena, programs: int) -> None:
    host, _, moves, _ = pages(arena)
    copy = BlockCopy(arena, host, KEPT, programs=programs)
    before = arena.bytes.clone()
    done = copy.store(moves)
    assert done.done() and torch.equal(arena.bytes, before)
    expected = expected_host(arena, torch.zeros_like(host), moves)
    assert expected.any() and torch.equal(host, expected)

    for group, block, _ in moves:
        arena.fields(group)[:, block] = 0
    assert not torch.equal(arena.bytes, before)
    loaded = copy.load(moves)
    for layer in range(4):
        copy.wait(loaded, layer)
    assert torch.equal(arena.bytes, before) and torch.equal(host, expected)


def test_nothing_to_copy(arena: DeviceArena) -> None:
    host = pages(arena)[0]
    copy, before = BlockCopy(arena, host, KEPT), arena.bytes.clone()
    copy.wait(copy.load([]), 3)
    copy.store([]).synchronize()
    assert torch.equal(arena.bytes, before) and not host.any()


def test_layers_are_ready_in_order_and_only_by_their_own_load(
    arena: DeviceArena, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every program of a load counts in every layer, after its writes; stores and earlier loads do not count."""
    host, _, moves, _ = pages(arena)
    copy = BlockCopy(arena, host, KEPT, programs=4)
    copy.store(moves)
    assert copy._counters.tolist() == [0, 0, 0, 0]
    first, second = copy.load(moves), copy.load(moves[:1])
    assert (first.counter, second.counter) == (4, 8)
    assert copy._counters.tolist() == [8, 8, 8, 8]
    copy.wait(first, 0)
    waited: list[int] = []
    monkeypatch.setattr(block_copy, "_wait", {(1,): lambda counters, layer, until, num_warps: waited.append(until)})
    copy.wait(second, 2)
    assert waited == [8]


def test_counters_may_wrap(arena: DeviceArena) -> None:
    host, _, moves, _ = pages(arena)
    copy = BlockCopy(arena, host, KEPT, programs=4)
    copy._launches = 2**29 - 1
    copy._counters.fill_(2**31 - 4)
    loaded = copy.load(moves)
    assert loaded.counter == -(2**31) == int(copy._counters[0])
    copy.wait(loaded, 3)


def test_memory_that_is_not_aligned_is_refused(arena: DeviceArena) -> None:
    host = torch.zeros(4096, dtype=torch.uint8)
    with pytest.raises(ValueError, match="16 bytes"):
        BlockCopy(arena, host[1:], KEPT)
