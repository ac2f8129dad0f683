"""Mooncake alone: ``python -m benchmarks.harness.bare_get MASTER TENANT PARTS``, keys on stdin, bytes/s on stdout.

The keys are read in PARTS equal parts, each in one ``batch_get_into`` into touched, registered memory; the fastest of
all counts.
"""

from __future__ import annotations

import os
import sys
import time

import numpy as np


def main(master: str, tenant: str, parts: int) -> None:
    from mooncake.store import MooncakeDistributedStore

    keys = sys.stdin.read().split()
    store = MooncakeDistributedStore()
    code = store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 1 << 20, "tcp", "", master, tenant_id=tenant)
    assert code == 0, f"setup: {code}"
    size = store.get_size(keys[0])
    stride = -(-size // 4096) * 4096
    count = len(keys) // parts
    memory = np.ones(count * stride, dtype=np.uint8)
    assert store.register_buffer(memory.ctypes.data, memory.nbytes) == 0
    places = [memory.ctypes.data + number * stride for number in range(count)]
    best = 0.0
    for _ in range(4):
        for part in range(parts):
            batch = keys[part * count : (part + 1) * count]
            started = time.perf_counter()
            codes = store.batch_get_into(batch, places, [size] * count)
            seconds = time.perf_counter() - started
            assert codes == [size] * count, codes
            best = max(best, count * size / seconds)
    print(best, flush=True)
    # Mooncake's destructors take a second and are not what is measured.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
