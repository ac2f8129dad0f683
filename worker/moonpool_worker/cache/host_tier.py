"""L2: pages in host memory, in one memfd that another process can map; :mod:`host_layout` says where."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from moonpool_worker.cache.block_header import (
    HEADER_BYTES,
    Identity,
    Mismatch,
    erase_header,
    key_digest,
    read_identity,
    verify,
    verify_identity,
    write_header,
)
from moonpool_worker.cache.block_pool import BlockPool
from moonpool_worker.cache.cache_group import cache_groups
from moonpool_worker.cache.device_arena import DeviceArena
from moonpool_worker.cache.host_layout import SLOT_ALIGNMENT, HostLayout
from moonpool_worker.cache.host_memory import HostMemory
from moonpool_worker.cache.prefix_index import Clock, Node
from moonpool_worker.cache.store_tier.keys import store_key

#: A batch is checked and copied while it is in the processor's cache: 32 pages of a small model are 12 MB. Each batch
#: wakes torch's threads once: 8 pages at a time were copied at 86 % of a plain copy's speed, 32 at all of it.
_COPY_AT_ONCE = 32
#: Torch copies strided bytes a third faster as words; fields begin and end at multiples of 64 bytes in both tiers.
_WORD = torch.int64
_ALIGNED = 64


class Page(NamedTuple):
    """A page of one group in L1 that is to be kept in L2; ``name`` is the digest of its store key."""

    group: int
    blocks: tuple[int, ...]
    digest: bytes
    parent: bytes | None
    depth: int
    name: bytes


@dataclass(slots=True)
class RestoreReport:
    """What a walk over the slots of an earlier process found: pages by group, and refusals by reason."""

    pages: dict[int, int] = field(default_factory=dict)
    refused: dict[str, int] = field(default_factory=dict)


class HostTier:
    """Slots for all groups in ``size`` bytes, lazily touched, and the index of the pages in them.

    A slot is free, resident (in the index), private (a suspended request's) or *lent*: being filled or drained by the
    L3 process. A resident slot that L3 reads is pinned by a reference. Nothing else may write to a lent slot until the
    L3 process answered for it or is dead; when the request no longer waits for it, it is called quarantined.

    With ``retain`` false the tier is a staging arena: a page leaves when its last reference goes. ``fd``: a memfd to
    use, with what an earlier process left in it (:meth:`restore`).
    """

    def __init__(
        self,
        arena: DeviceArena,
        size: int,
        retain: bool = True,
        fd: int | None = None,
        alignment: int = SLOT_ALIGNMENT,
        on_evict: Callable[[Node], None] = lambda node: None,
        clock: Clock | None = None,
    ) -> None:
        self.arena = arena
        self.retain = retain
        self.groups = cache_groups(arena.geometry)
        self.layout = HostLayout(arena.plan, self.groups, size, alignment)
        if self.layout.parents < 1:
            need = self.layout.parent_bytes
            what = "one slot takes" if len(self.groups) == 1 else "the smallest part that all cache groups can tile is"
            raise ValueError(f"L2 of {size} bytes holds no block; {what} {need} bytes")
        self.nbytes = self.layout.parents * self.layout.parent_bytes
        self._memory = HostMemory(self.nbytes, fd)
        if arena.device.type == "cuda":
            # Only pinned memory is read and written by the device itself, beside its computing.
            from moonpool_worker.kernels.triton.block_copy import map_host

            map_host(self._memory.flat)
        self._fields = [arena.fields(group.index) for group in self.groups]
        self.index = BlockPool(
            self.layout, [group.closed for group in self.groups], 0, self.layout.parents, on_evict, clock
        )
        self._last_slot: list[int | None] = [None] * len(self.groups)
        self.lent = 0

    @property
    def fd(self) -> int:
        return self._memory.fd

    @property
    def num_groups(self) -> int:
        return len(self.groups)

    @property
    def num_slots(self) -> int:
        """Slots if all of L2 were the first group's."""
        return self.layout.parents * self.layout.packing[0]

    @property
    def free_slots(self) -> int:
        """Slots of the first group that can be had without an eviction."""
        return self.index.free_blocks(0)

    def object_bytes(self, group: int) -> int:
        """Bytes of one L3 object of a group: header and payload."""
        return self.layout.object_bytes(group)

    def offset(self, group: int, slot: int) -> int:
        """Byte offset of a slot's header in the memfd."""
        return self.layout.offset(group, slot)

    def slot(self, group: int, slot: int) -> memoryview:
        """Header and payload of one slot."""
        start = self.layout.offset(group, slot)
        return self._memory.bytes[start : start + self.layout.object_bytes(group)]

    # -- slots -------------------------------------------------------------------------------------------------

    def take_slot(self, group: int) -> int | None:
        """A private slot to fill, evicting if needed; None when all are lent or pinned."""
        slots = self.take_slots(group, 1)
        return slots[0] if slots else None

    def take_slots(self, group: int, count: int) -> list[int]:
        """Private slots to fill, evicting if needed; fewer when the others are lent or pinned."""
        wanted = min(count, self.index.available(group))
        slots = self._take(group, wanted)
        # Not all at once: what continues a page may be pinned while the page is not.
        while len(slots) < wanted and (one := self._take(group, 1)):
            slots += one
        return slots

    def _take(self, group: int, count: int) -> list[int]:
        demand = [0] * len(self.groups)
        after: list[int | None] = [None] * len(self.groups)
        # Neighbours of the text are neighbours in L2: a run of slots is one copy.
        demand[group], after[group] = count, self._last_slot[group]
        try:
            slots = self.index.take(demand, after)[group]
        except ValueError:
            return []
        for slot in slots:
            self._memory.will_use(self.layout.offset(group, slot))
            # Whoever finds this memory after a crash must not take half of a new block for a whole old one.
            erase_header(self.slot(group, slot))
            self._last_slot[group] = slot
        return slots

    def give_slot(self, group: int, slot: int) -> None:
        self.index.give(group, (slot,))

    def adopt(
        self, group: int, slot: int, digest: bytes, parent: bytes | None, depth: int, name: bytes
    ) -> Node | Mismatch:
        """Take a slot that L3 filled into the index, with one reference. A mismatch leaves the slot with the caller."""
        reason = verify(self.slot(group, slot), name, self.layout.shapes[group].payload_bytes)
        if reason is not None:
            return reason
        return self.index.insert(group, digest, parent, depth, (slot,), refs=1)

    def release(self, node: Node) -> None:
        """Give up one reference."""
        if not self.retain and node.refs == 1:
            self.index.remove(node)
        self.index.unref(node)

    # -- copies ------------------------------------------------------------------------------------------------

    def store(self, pages: Sequence[Page]) -> list[Node]:
        """Copy pages of L1 into new slots; those for which there is no room are left out.

        Each node comes with one reference, which the caller gives up when it needs the page no longer.
        """
        nodes: list[Node] = []
        for batch in _batches(pages):
            group = batch[0].group
            slots = self.take_slots(group, len(batch))
            batch = batch[: len(slots)]
            self._copy_down(group, [page.blocks for page in batch], slots)
            for page, slot in zip(batch, slots, strict=True):
                identity = Identity(page.name, group, page.digest, page.parent)
                write_header(self.slot(group, slot), identity, self.layout.shapes[group].payload_bytes)
                nodes.append(self.index.insert(group, page.digest, page.parent, page.depth, (slot,), refs=1))
        return nodes

    def load(
        self, nodes: Sequence[Node], blocks: Sequence[tuple[int, ...]], names: Sequence[bytes]
    ) -> tuple[int, Mismatch | None]:
        """Copy pages of one group into L1, bit for bit, up to the first that is not the one of its name: how many were
        copied, and the reason."""
        for start in range(0, len(nodes), _COPY_AT_ONCE):
            batch = nodes[start : start + _COPY_AT_ONCE]
            good, reason = self._verify(batch, names[start : start + _COPY_AT_ONCE])
            if good:
                slots = [node.slot for node in batch[:good]]
                self._copy_up(batch[0].group, slots, blocks[start : start + good])
            if reason is not None:
                return start + good, reason
        return len(nodes), None

    def check(self, node: Node, name: bytes) -> Mismatch | None:
        """Whether a resident page is the one of that name. Its bytes are read only if nobody did since they came."""
        verifier = verify_identity if node.checked else verify
        reason = verifier(self.slot(node.group, node.slot), name, self.layout.shapes[node.group].payload_bytes)
        node.checked = reason is None
        return reason

    def save(self, group: int, blocks: Sequence[int]) -> list[int] | None:
        """Copy any L1 blocks of a group into private slots, in order; None, and nothing taken, without room."""
        kept = self.layout.shapes[group].kept
        slots: list[int] = []
        for start in range(0, len(blocks), kept):
            slot = self.take_slot(group)
            if slot is None:
                self.discard(group, slots)
                return None
            slots.append(slot)
            for host, device in self._blocks(group, slot, blocks[start : start + kept]):
                host.copy_(device)
        return slots

    def bring(self, group: int, slots: Sequence[int], blocks: Sequence[int]) -> None:
        """Copy what :meth:`save` kept into L1 blocks."""
        kept = self.layout.shapes[group].kept
        for number, slot in enumerate(slots):
            for host, device in self._blocks(group, slot, blocks[number * kept : (number + 1) * kept]):
                device.copy_(host)

    def discard(self, group: int, slots: Sequence[int]) -> None:
        """Give private slots back."""
        self.index.give(group, slots)

    def _verify(self, nodes: Sequence[Node], names: Sequence[bytes]) -> tuple[int, Mismatch | None]:
        for done, (node, name) in enumerate(zip(nodes, names, strict=True)):
            reason = self.check(node, name)
            if reason is not None:
                return done, reason
        return len(nodes), None

    def _copy_down(self, group: int, pages: Sequence[tuple[int, ...]], slots: Sequence[int]) -> None:
        for host, device in self._pairs(group, pages, slots):
            host.view(_WORD).copy_(device.view(_WORD))

    def _copy_up(self, group: int, slots: Sequence[int], pages: Sequence[tuple[int, ...]]) -> None:
        for host, device in self._pairs(group, pages, slots):
            device.view(_WORD).copy_(host.view(_WORD))

    def _pairs(self, group: int, pages: Sequence[tuple[int, ...]], slots: Sequence[int]) -> Iterator[_Pair]:
        """Parts of slots and arena that belong together, as large as neighbours on both sides allow."""
        fields, kept = self._fields[group], self.layout.shapes[group].kept
        offsets = [self.layout.offset(group, slot) for slot in slots]
        start = 0
        while start < len(slots):
            first = pages[start][0]
            if not _consecutive(pages[start]):
                yield from self._blocks(group, slots[start], pages[start])
                start += 1
                continue
            step = max(_ALIGNED, offsets[start + 1] - offsets[start]) if start + 1 < len(slots) else _ALIGNED
            stop = start + 1
            while (
                stop < len(slots)
                and offsets[stop] - offsets[stop - 1] == step
                and pages[stop][0] == pages[stop - 1][-1] + 1
                and _consecutive(pages[stop])
            ):
                stop += 1
            count = stop - start
            device = fields[:, first : first + count * kept].unflatten(1, (count, kept))
            yield self._view(group, offsets[start], step, count), device
            start = stop

    def _blocks(self, group: int, slot: int, blocks: Sequence[int]) -> Iterator[_Pair]:
        """A page, or the beginning of one, whose blocks are anywhere."""
        host = self._view(group, self.layout.offset(group, slot), 1, 1)
        for place, block in enumerate(blocks):
            yield host[:, 0, place], self._fields[group][:, block]

    def _view(self, group: int, offset: int, step: int, count: int) -> torch.Tensor:
        """The payloads ``[fields, count, kept, field_bytes]`` of slots that are ``step`` bytes apart."""
        shape = self.layout.shapes[group]
        return self._memory.flat.as_strided(
            (shape.fields, count, shape.kept, shape.field_bytes),
            (shape.kept * shape.field_bytes, step, shape.field_bytes, 1),
            offset + HEADER_BYTES,
        )

    # -- after a crash -----------------------------------------------------------------------------------------

    def restore(self, namespace: str) -> RestoreReport:
        """Take in what an earlier process left in this memory, as far as its headers are of this namespace.

        Only for a tier that nothing has been stored in yet. Payloads are not read now, which would take seconds for a
        large L2, but each before its first use. A parent goes to the group that most of its slots are of.
        """
        report = RestoreReport()
        count = min(self.layout.parents, self._memory.found // self.layout.parent_bytes)
        seen: set[tuple[int, bytes]] = set()
        found: dict[int, tuple[int, list[tuple[int, Identity]]]] = {}
        for parent in range(count):
            tilings = [list(self._intact(group, parent, namespace, report)) for group in range(self.num_groups)]
            group = max(range(self.num_groups), key=lambda one: len(tilings[one]))
            slots = tilings[group]
            fresh = [(slot, identity) for slot, identity in slots if (group, identity.digest) not in seen]
            seen.update((group, identity.digest) for _, identity in fresh)
            if fresh:
                found[parent] = group, fresh
        self.index.seize(
            count, {parent: (group, [slot for slot, _ in fresh]) for parent, (group, fresh) in found.items()}
        )
        for group, fresh in found.values():
            for slot, identity in fresh:
                node = self.index.insert(group, identity.digest, identity.parent, 0, (slot,))
                node.checked = False
            report.pages[group] = report.pages.get(group, 0) + len(fresh)
        return report

    def _intact(self, group: int, parent: int, namespace: str, report: RestoreReport) -> Iterator[tuple[int, Identity]]:
        payload = self.layout.shapes[group].payload_bytes
        for slot in self.layout.blocks_of(group, parent):
            memory = self.slot(group, slot)
            identity = read_identity(memory)
            if identity is None or identity.group != group:
                continue
            name = key_digest(store_key(namespace, identity.digest, group))
            reason = verify_identity(memory, name, payload)
            if reason is None:
                yield slot, identity
            else:
                report.refused[reason.value] = report.refused.get(reason.value, 0) + 1

    def close(self) -> None:
        """Give the memory back. Nobody else may use the tier any more."""
        self._memory.close()


#: A part of L2 and the part of L1 that it is a copy of: uint8 of one shape.
_Pair = tuple[torch.Tensor, torch.Tensor]


def _consecutive(blocks: Sequence[int]) -> bool:
    return len(blocks) == 1 or list(blocks) == list(range(blocks[0], blocks[0] + len(blocks)))


def _batches(pages: Sequence[Page]) -> Iterator[Sequence[Page]]:
    """Pages of one group each, in order."""
    start = 0
    for i in range(1, len(pages) + 1):
        if i == len(pages) or i - start == _COPY_AT_ONCE or pages[i].group != pages[start].group:
            yield pages[start:i]
            start = i
