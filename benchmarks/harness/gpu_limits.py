"""How fast a GPU is, as measured: its own copy and its own matrix product are what kernels are held against."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch


def seconds(work: Callable[[], object], least: float = 0.1) -> float:
    """Per call, the median of five runs of calls back to back, of together ``least`` seconds or more."""

    def run(calls: int) -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(calls):
            work()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1000 / calls

    run(2)
    calls = max(1, min(200, round(least / 5 / max(run(3), 1e-6))))
    return statistics.median(run(calls) for _ in range(5))


@dataclass(frozen=True)
class Limits:
    """Bytes per second of device memory, both ways of the link to host memory; operations per second in bfloat16."""

    memory: float
    to_host: float
    to_device: float
    products: float

    def least_seconds(self, moved: float, operations: float) -> float:
        """What the device needs for it if all goes as well as it can."""
        return max(moved / self.memory, operations / self.products)


def measure() -> Limits:
    """On the current device; takes some 3 GB of its memory and 1 GB of pinned host memory."""
    source, target = (torch.empty(1 << 30, dtype=torch.uint8, device="cuda") for _ in range(2))
    memory = 2 * source.numel() / seconds(lambda: target.copy_(source))
    host = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    to_host = host.numel() / seconds(lambda: host.copy_(source, non_blocking=True))
    to_device = host.numel() / seconds(lambda: source.copy_(host, non_blocking=True))
    a, b = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2))
    products = 2 * 8192**3 / seconds(lambda: a @ b)
    return Limits(memory, to_host, to_device, products)
