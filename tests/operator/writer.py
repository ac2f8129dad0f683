"""Run as a process: put COUNT objects of SIZE bytes into TENANT of the store at MASTER, as a worker would."""

from __future__ import annotations

import os
import sys


def main(master: str, tenant: str, count: int, size: int) -> int:
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    code = store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", master, tenant_id=tenant)
    codes = [store.put(f"{tenant}|{i}", os.urandom(size)) for i in range(count)] if code == 0 else [code]
    print(",".join(map(str, sorted(set(codes)))), flush=True)
    os._exit(0 if set(codes) == {0} else 1)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
