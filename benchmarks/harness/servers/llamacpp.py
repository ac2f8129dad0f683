"""llama.cpp's server from the xllamacpp wheel, on the same GGUF.

``python -m benchmarks.harness.servers.llamacpp PORT GGUF`` is the server process.
"""

from __future__ import annotations

import sys
import threading
from contextlib import AbstractContextManager
from importlib.util import find_spec

from benchmarks.harness.servers.process import CouldNotRun, Server, free_port, serving


def llamacpp(gguf: str) -> AbstractContextManager[Server]:
    if find_spec("xllamacpp") is None:
        raise CouldNotRun("xllamacpp is not installed: uv sync --extra bench")
    port = free_port()
    command = [sys.executable, "-m", "benchmarks.harness.servers.llamacpp", str(port), gguf]
    return serving(command, port, "smollm2", "/health", 120)


def _run(port: int, gguf: str) -> None:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = gguf
    params.hostnames = ["127.0.0.1"]
    params.port = port
    params.model_alias = {"smollm2"}
    # Eight slots of 4,096 tokens: what our own server is asked to hold.
    params.n_parallel = 8
    params.n_ctx = 8 * 4096
    params.cpuparams.n_threads = 2
    params.cpuparams_batch.n_threads = 2
    server = xllamacpp.Server(params)
    print(f"serving at {server.listening_address}", flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    _run(int(sys.argv[1]), sys.argv[2])
