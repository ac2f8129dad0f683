"""One benchmark, one flat JSON line."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from pathlib import Path


def machine() -> str:
    """Processor, cores and memory, in words."""
    model = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return f"{model}, {len(os.sched_getaffinity(0))} cores, {round(pages * size / 2**30)} GiB, {platform.system()}"


def say(text: str) -> None:
    """Progress, on stderr: stdout is for the one line."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


class Report:
    """Collects figures and prints them; a figure may be a number, a text, or None with a ``why`` beside it."""

    def __init__(self, benchmark: str) -> None:
        self._benchmark, self._begin = benchmark, time.monotonic()
        self.figures: dict[str, float | int | str | None] = {}

    def add(self, **figures: float | int | str | None) -> None:
        for key, value in figures.items():
            self.figures[key] = round(value, 4) if isinstance(value, float) else value

    def line(self) -> str:
        head = {
            "benchmark": self._benchmark,
            "seconds": round(time.monotonic() - self._begin, 1),
            "machine": machine(),
        }
        return json.dumps(head | self.figures, ensure_ascii=False)
