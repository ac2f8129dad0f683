"""L2: blocks in host memory, in one memfd that another process can map.

A memfd counts to the pod's cgroup, needs no ``/dev/shm`` and goes to a child by descriptor. A slot is a header, then
the block's fields (each plane of each layer), one after another; slots start on a memory page.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from moonpool_worker.cache.block_header import HEADER_BYTES, Mismatch, verify, write_header
from moonpool_worker.cache.device_arena import DeviceArena
from moonpool_worker.cache.free_runs import FreeRuns
from moonpool_worker.cache.prefix_index import Node, PrefixIndex

_PAGE = 4096
#: A batch is checked and copied while it is in the processor's cache: 8 blocks of a small model are 3 MB.
_COPY_AT_ONCE = 8


class Page(NamedTuple):
    """An L1 block to be kept in L2: its link, its predecessor's, and the digest of its store key."""

    block: int
    digest: bytes
    parent: bytes | None
    name: bytes


def slot_stride(payload_bytes: int) -> int:
    """Bytes from one slot to the next."""
    used = HEADER_BYTES + payload_bytes
    return (used + _PAGE - 1) // _PAGE * _PAGE


class HostTier:
    """``size // slot_stride`` slots, lazily touched, and the index of the blocks in them.

    A slot is free, resident (in the index), or *lent*: being filled or drained by the L3 process. A resident slot that
    L3 reads is pinned by a reference. Nothing else may write to a lent slot until the L3 process answered for it or
    is dead; when the request no longer waits for it, it is called quarantined.

    With ``retain`` false the tier is a staging arena: a block leaves when its last reference goes.
    """

    def __init__(self, arena: DeviceArena, size: int, retain: bool = True) -> None:
        plan = arena.plan.groups[0]
        self.arena = arena
        self.retain = retain
        self.payload_bytes = plan.payload_bytes
        self.stride = slot_stride(self.payload_bytes)
        self.num_slots = size // self.stride
        if self.num_slots < 1:
            raise ValueError(f"L2 of {size} bytes holds no block; one slot takes {self.stride} bytes")
        self.nbytes = self.num_slots * self.stride
        self.fd = os.memfd_create("moonpool-l2", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, self.nbytes)
        self._map = mmap.mmap(self.fd, self.nbytes)
        self._bytes = memoryview(self._map)
        flat = torch.frombuffer(self._map, dtype=torch.uint8)
        #: [fields, slots, field_bytes]
        self._slots = flat.as_strided(
            (plan.fields, self.num_slots, plan.field_bytes), (plan.field_bytes, self.stride, 1), HEADER_BYTES
        )
        self._fields = arena.fields(0)
        self._free = FreeRuns(0, self.num_slots)
        self.index = PrefixIndex(self._release)
        self._last_slot: int | None = None
        self.lent = 0
        self.evictions = 0

    @property
    def object_bytes(self) -> int:
        """Bytes of one L3 object: header and payload."""
        return HEADER_BYTES + self.payload_bytes

    def slot(self, slot: int) -> memoryview:
        """Header and payload of one slot."""
        start = slot * self.stride
        return self._bytes[start : start + self.object_bytes]

    def take_slot(self) -> int | None:
        """A slot to fill, evicting if needed; None when all are lent or pinned."""
        if not len(self._free):
            victim = self.index.victim()
            if victim is None:
                return None
            self.evictions += 1
            self.index.remove(victim)
        # Neighbours of the text are neighbours in L2: a run of slots is one copy.
        (self._last_slot,) = self._free.take(1, after=self._last_slot)
        return self._last_slot

    def give_slot(self, slot: int) -> None:
        self._free.give((slot,))

    @property
    def free_slots(self) -> int:
        return len(self._free)

    def store(self, pages: Sequence[Page]) -> list[Node]:
        """Copy L1 blocks into new slots; shorter than ``pages`` when there is no room for the rest.

        Each node comes with one reference, which the caller gives up when it needs the block no longer.
        """
        nodes: list[Node] = []
        for start in range(0, len(pages), _COPY_AT_ONCE):
            batch = pages[start : start + _COPY_AT_ONCE]
            slots: list[int] = []
            while len(slots) < len(batch) and (slot := self.take_slot()) is not None:
                slots.append(slot)
            for block, slot, count in _runs([page.block for page in batch[: len(slots)]], slots):
                self._slots[:, slot : slot + count].copy_(self._fields[:, block : block + count])
            for page, slot in zip(batch, slots, strict=False):
                write_header(self.slot(slot), page.name, self.payload_bytes)
                nodes.append(self.index.insert(page.digest, page.parent, slot, refs=1))
            if len(slots) < len(batch):
                break
        return nodes

    def load(self, slots: Sequence[int], blocks: Sequence[int], names: Sequence[bytes]) -> tuple[int, Mismatch | None]:
        """Copy slots into L1 blocks, bit for bit, up to the first that does not verify: how many, and its reason."""
        for start in range(0, len(slots), _COPY_AT_ONCE):
            batch = slots[start : start + _COPY_AT_ONCE]
            good, reason = self._verify(batch, names[start : start + _COPY_AT_ONCE])
            for slot, block, count in _runs(batch[:good], blocks[start : start + good]):
                self._fields[:, block : block + count].copy_(self._slots[:, slot : slot + count])
            if reason is not None:
                return start + good, reason
        return len(slots), None

    def _verify(self, slots: Sequence[int], names: Sequence[bytes]) -> tuple[int, Mismatch | None]:
        for done, (slot, name) in enumerate(zip(slots, names, strict=True)):
            reason = verify(self.slot(slot), name, self.payload_bytes)
            if reason is not None:
                return done, reason
        return len(slots), None

    def adopt(self, slot: int, digest: bytes, parent: bytes | None, name: bytes) -> Node | Mismatch:
        """Take a slot that L3 filled into the index, with one reference. A mismatch leaves the slot with the caller."""
        reason = verify(self.slot(slot), name, self.payload_bytes)
        if reason is not None:
            return reason
        return self.index.insert(digest, parent, slot, refs=1)

    def release(self, node: Node) -> None:
        """Give up one reference."""
        if not self.retain and node.refs == 1:
            self.index.remove(node)
        self.index.unref(node)

    def close(self) -> None:
        """Give the memory back. Nobody else may use the tier any more."""
        del self._slots
        os.close(self.fd)
        self._bytes.release()
        try:
            self._map.close()
        except BufferError:
            # A tensor still looks at it (a traceback, a debugger): the pages go when that does.
            return

    def _release(self, node: Node) -> None:
        self._free.give((node.slot,))


def _runs(left: Sequence[int], right: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Stretches in which both lists count upwards by one: first of the left, first of the right, length."""
    start = 0
    for i in range(1, len(left) + 1):
        if i == len(left) or left[i] != left[i - 1] + 1 or right[i] != right[i - 1] + 1:
            yield left[start], right[start], i - start
            start = i
