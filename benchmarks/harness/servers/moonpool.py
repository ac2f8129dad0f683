"""Our own worker, alone, with its defaults."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager

from benchmarks.harness.servers.process import Server, free_port, serving


def moonpool(*flags: str) -> AbstractContextManager[Server]:
    port = free_port()
    command = [
        sys.executable, "-m", "moonpool_worker", "serve", "smollm2", "--host", "127.0.0.1", "--port", str(port),
        "--served-name", "smollm2", "--max-model-len", "4096", *flags,
    ]  # fmt: skip
    return serving(command, port, "smollm2", "/ready", 180)
