"""Blocks between the device's arena and host memory: one launch for many blocks of all groups, ready layer by layer.

The host memory is pinned and mapped, so that a kernel reads and writes it by its address. All programs of a launch go
through the layers in order and add 1 to the layer's counter when their share of it is done; a reader of layer 7 waits
until all of them have, on the device, while layer 8 is still on its way. The idea of the flags is TokenSpeed's (2026).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from moonpool_worker.cache.device_arena import DeviceArena

#: Programs of a launch: enough to fill a PCIe or NVLink-C2C link, few enough to leave the device to the forward pass.
_PROGRAMS = 64
#: 8-byte words that a program copies at once.
_WORDS = 512
#: cudaHostRegisterPortable | cudaHostRegisterMapped.
_REGISTER = 3


class Move(NamedTuple):
    """Block ``block`` of ``group``; ``offset`` is the byte of the host memory where its first field is."""

    group: int
    block: int
    offset: int


@dataclass(slots=True)
class Copy:
    """A launch on its way. ``counter`` is what every layer's counter has reached when the layer is done."""

    counter: int
    event: torch.cuda.Event | None

    def done(self) -> bool:
        return self.event is None or bool(self.event.query())

    def synchronize(self) -> None:
        """Block the calling thread until the whole copy is done."""
        if self.event is not None:
            self.event.synchronize()


@triton.jit
def _copy(
    fields,
    layer_fields,
    moves,
    group_moves,
    counters,
    layers,
    TO_HOST: tl.constexpr,
    WORDS: tl.constexpr,
):
    program, programs = tl.program_id(0), tl.num_programs(0)
    word = tl.arange(0, WORDS)
    # Items are dealt round in one row over all fields, else the first programs would get more of small copies.
    dealt = 0
    for layer in range(layers):
        for number in range(tl.load(layer_fields + layer), tl.load(layer_fields + layer + 1)):
            field = fields + number * 5
            group = tl.load(field)
            device_base, device_stride = tl.load(field + 1), tl.load(field + 2)
            host_offset, words = tl.load(field + 3), tl.multiple_of(tl.load(field + 4), 2)
            first = tl.load(group_moves + group)
            parts = (words + WORDS - 1) // WORDS
            items = (tl.load(group_moves + group + 1) - first) * parts
            for item in range((program + programs - dealt) % programs, items, programs):
                move = moves + (first + item // parts) * 2
                device = (device_base + tl.load(move) * device_stride).to(tl.pointer_type(tl.int64))
                host = (tl.load(move + 1) + host_offset).to(tl.pointer_type(tl.int64))
                device, host = tl.multiple_of(device, 16), tl.multiple_of(host, 16)
                at = (item % parts) * WORDS + word
                if TO_HOST:
                    tl.store(host + at, tl.load(device + at, mask=at < words), mask=at < words, cache_modifier=".cs")
                else:
                    loaded = tl.load(host + at, mask=at < words, cache_modifier=".cg")
                    tl.store(device + at, loaded, mask=at < words)
            dealt = ((dealt + items) % programs).to(tl.int32)
        # All threads have written before the one that counts does, and what it releases includes their writes.
        tl.debug_barrier()
        tl.atomic_add(counters + layer, 1, sem="release", scope="gpu")


@triton.jit(do_not_specialize=["layer", "until"])
def _wait(counters, layer, until):
    while tl.atomic_add(counters + layer, 0, sem="acquire", scope="gpu") - until < 0:
        pass


class BlockCopy:
    """Copies between ``arena`` and ``host``, uint8 [bytes], on two streams of their own.

    A host page of group g is ``[fields, kept[g], field_bytes]``, fields in the arena's order, so that a block's fields
    lie ``kept[g] * field_bytes`` apart. Both sides must be aligned to 16 bytes, ValueError otherwise.

    Who calls keeps the blocks of a copy from being used otherwise until it is done; a copy begins behind all that was
    put on the caller's stream before.
    """

    def __init__(self, arena: DeviceArena, host: torch.Tensor, kept: Sequence[int], programs: int = _PROGRAMS) -> None:
        self._host = host
        self._device = arena.device
        self._programs = programs
        self._groups = len(arena.plan.groups)
        rows = [row for group in range(self._groups) for row in _fields(arena, group, kept[group])]
        rows.sort(key=lambda row: row[0])
        self._layers = sorted({row[0] for row in rows})
        if any(number % 16 for _, _, *numbers in rows for number in numbers) or host.data_ptr() % 16:
            raise ValueError("blocks cannot be copied by a kernel: they are not aligned to 16 bytes")
        self._fields = torch.tensor(
            [[group, base, stride, offset, size // 8] for _, group, base, stride, offset, size in rows],
            dtype=torch.int64,
            device=self._device,
        )
        ends = [sum(row[0] <= layer for row in rows) for layer in self._layers]
        self._layer_fields = torch.tensor([0, *ends], dtype=torch.int32, device=self._device)
        self._counters = torch.zeros(len(self._layers), dtype=torch.int32, device=self._device)
        self._launches = 0
        on_gpu = self._device.type == "cuda"
        self._load_stream = torch.cuda.Stream(self._device, priority=-1) if on_gpu else None
        self._store_stream = torch.cuda.Stream(self._device) if on_gpu else None
        # Stores must not count: a load's readers would take them for the load.
        self._uncounted = torch.zeros_like(self._counters)

    def load(self, moves: Iterable[Move]) -> Copy:
        """Host to device; :meth:`wait` puts a wait for one layer on the caller's stream."""
        self._launches += 1
        event = self._launch(moves, self._counters, self._load_stream, to_host=False)
        # Counters are 32 bits wide and may wrap; what is compared is the difference.
        counter = self._launches * self._programs
        return Copy((counter + 2**31) % 2**32 - 2**31, event)

    def store(self, moves: Iterable[Move]) -> Copy:
        """Device to host; the host may read when the copy is done."""
        return Copy(0, self._launch(moves, self._uncounted, self._store_stream, to_host=True))

    def wait(self, copy: Copy, layer: int) -> None:
        """What is put on the caller's stream from now on sees the model's layer ``layer`` of a :meth:`load`."""
        _wait[(1,)](self._counters, self._layers.index(layer), copy.counter, num_warps=1)

    def _launch(
        self, moves: Iterable[Move], counters: torch.Tensor, stream: torch.cuda.Stream | None, *, to_host: bool
    ) -> torch.cuda.Event | None:
        ordered = sorted(moves)
        base = self._host.data_ptr()
        table = torch.tensor([[move.block, base + move.offset] for move in ordered] or [[0, 0]], dtype=torch.int64)
        ends = [sum(move.group < group for move in ordered) for group in range(self._groups + 1)]
        bounds = torch.tensor(ends, dtype=torch.int64)

        def launch(moves: torch.Tensor, group_moves: torch.Tensor) -> None:
            _copy[(self._programs,)](
                self._fields,
                self._layer_fields,
                moves,
                group_moves,
                counters,
                len(self._layers),
                TO_HOST=to_host,
                WORDS=_WORDS,
                num_warps=8,
            )

        if stream is None:
            launch(table.to(self._device), bounds.to(self._device))
            return None
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            launch(
                table.pin_memory().to(self._device, non_blocking=True),
                bounds.pin_memory().to(self._device, non_blocking=True),
            )
            event = torch.cuda.Event()
            event.record(stream)
        return event


def _fields(arena: DeviceArena, index: int, kept: int) -> list[tuple[int, int, int, int, int, int]]:
    """(layer, group, device address, bytes between blocks, offset in the host page, bytes) of each field."""
    fields = arena.fields(index)
    count, _, size = fields.shape
    layers = arena.plan.groups[index].geometry.layers
    per_layer = count // len(layers)
    return [
        (layers[field // per_layer], index, fields[field].data_ptr(), fields.stride(1), field * kept * size, size)
        for field in range(count)
    ]


def map_host(host: torch.Tensor) -> None:
    """Pin host memory and let the device address it, for as long as the process lives or :func:`unmap_host`.

    RuntimeError when the driver refuses, for example over the limit on locked memory.
    """
    code = int(torch.cuda.cudart().cudaHostRegister(host.data_ptr(), host.numel(), _REGISTER))
    if code:
        raise RuntimeError(f"the CUDA driver does not pin {host.numel()} bytes of host memory: error {code}")


def unmap_host(host: torch.Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(host.data_ptr())
