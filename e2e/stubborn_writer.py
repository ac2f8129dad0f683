"""A writer of the old version that does not stop: what the store answers it, one line a try.

Runs inside a pod (``python3 -c`` with this file's text): ``MASTER TENANT``. Prints ``try <code>`` twenty times
a second, 0 for an accepted put.
"""

import os
import sys
import time

from mooncake.store import MooncakeDistributedStore


def main(master: str, tenant: str) -> None:
    client = MooncakeDistributedStore()
    # A pure client: no segment of its own.
    code = client.setup(os.environ["POD_IP"], "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", master, tenant_id=tenant)
    if code != 0:
        sys.exit(f"setup answered {code}")
    block = bytes(65536)
    number = 0
    while True:
        number += 1
        code = client.put(f"stubborn-{number}", block)
        print(f"try {code}", flush=True)
        time.sleep(0.05)


main(sys.argv[1], sys.argv[2])
