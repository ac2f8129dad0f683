"""Serving SmolLM2-135M on this CPU: ours, llama.cpp and vLLM, through the same HTTP client in the same run.

    uv run python -m benchmarks.serve_cpu [--repeats 3] [--peers llamacpp,vllm]

Raw figures are medians: ``*_cold_s`` and ``*_warm_s`` are the time to the first token of a prompt of about 2,000
tokens, new and repeated; ``*_shared_s`` is the time until four concurrent requests with one shared prefix of about
1,500 tokens have all ended; ``*_decode_1`` and ``*_decode_8`` are tokens per second while 1 and 8 requests decode;
``*_start_s`` is from starting the process to its first answer. ``vllm_cold`` and so on are ratios, ours over the
peer's: above 1, ours is better.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import httpx

from benchmarks.harness.client import complete, together, words
from benchmarks.harness.report import Report, say
from benchmarks.harness.servers.llamacpp import llamacpp
from benchmarks.harness.servers.moonpool import moonpool
from benchmarks.harness.servers.process import CouldNotRun, Server
from benchmarks.harness.servers.vllm import vllm

FIGURES = ("cold", "warm", "shared", "decode_1", "decode_8")
LONG, SHARED, TAIL = 2000, 1500, 40
STORY = "Once upon a time, in a village by the sea, there lived a {} who wanted to"
HEROES = ("baker", "tailor", "sailor", "teacher", "farmer", "painter", "miller", "dancer")


async def measure(server: Server, repeats: int) -> dict[str, float]:
    """All figures of one server, in seconds and tokens per second."""
    cold, warm, shared, decode_1, decode_8 = [], [], [], [], []
    # A connection per request: llama.cpp's server closes idle ones under the client's feet.
    limits = httpx.Limits(max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=server.url, timeout=600, limits=limits) as client:
        await complete(client, server.model, "Hello", 4)
        start = time.perf_counter() - server.started
        await complete(client, server.model, words(300, seed=1), 16)
        prompt_tokens = 0
        for turn in range(repeats):
            long = words(LONG, seed=100 + turn)
            first = await complete(client, server.model, long, 8)
            prompt_tokens = first.prompt_tokens
            cold.append(first.first_token)
            warm.append((await complete(client, server.model, long, 8)).first_token)
            prefix = words(SHARED, seed=200 + turn)
            tails = [f"{prefix} {words(TAIL, seed=300 + 10 * turn + i)}" for i in range(4)]
            shared.append((await together(client, server.model, tails, 8))[0])
            decode_1.append(await _decode(client, server, [STORY.format(HEROES[turn % 8])]))
            decode_8.append(await _decode(client, server, [STORY.format(hero) for hero in HEROES]))
    return {
        "start_s": start,
        "cold_s": statistics.median(cold),
        "warm_s": statistics.median(warm),
        "shared_s": statistics.median(shared),
        "decode_1": statistics.median(decode_1),
        "decode_8": statistics.median(decode_8),
        "prompt_tokens": prompt_tokens,
    }


async def _decode(client: httpx.AsyncClient, server: Server, prompts: list[str]) -> float:
    """Tokens per second of all requests together, from the first token of any to the last of all."""
    _, timings = await together(client, server.model, prompts, 96)
    decoded = sum(timing.tokens - 1 for timing in timings)
    return decoded / (max(t.last_token for t in timings) - min(t.first_token for t in timings))


def run(
    name: str, server: Callable[[], AbstractContextManager[Server]], repeats: int, report: Report
) -> dict[str, float]:
    """Measure one server into ``report``; an empty dict, and the reason in ``why``, when it cannot run."""
    say(f"{name}: starting")
    try:
        with server() as running:
            say(f"{name}: measuring")
            figures = asyncio.run(measure(running, repeats))
    except (CouldNotRun, RuntimeError, httpx.HTTPError) as fault:
        say(f"{name}: could not run: {fault}")
        report.add(**{f"{name}_{figure}": None for figure in FIGURES}, **{f"{name}_why": str(fault)})
        return {}
    say(f"{name}: {figures}")
    report.add(**{f"{name}_raw_{key}": value for key, value in figures.items()})
    return figures


def ratios(name: str, ours: dict[str, float], theirs: dict[str, float]) -> dict[str, float]:
    """Ours over the peer's, above 1 is better: less time, or more tokens per second."""
    if not ours or not theirs:
        return {}
    return {
        f"{name}_cold": theirs["cold_s"] / ours["cold_s"],
        f"{name}_warm": theirs["warm_s"] / ours["warm_s"],
        f"{name}_shared": theirs["shared_s"] / ours["shared_s"],
        f"{name}_decode_1": ours["decode_1"] / theirs["decode_1"],
        f"{name}_decode_8": ours["decode_8"] / theirs["decode_8"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--peers", default="llamacpp,vllm", help="which peers to measure, or an empty text")
    options = parser.parse_args()
    peers = set(filter(None, options.peers.split(",")))

    from moonpool_worker.weights.export import export_safetensors
    from moonpool_worker.weights.resolve import packaged_smollm2

    report = Report("serve_cpu")
    gguf = packaged_smollm2()
    ours = run("moonpool", moonpool, options.repeats, report)
    if "llamacpp" in peers:
        theirs = run("llamacpp", lambda: llamacpp(str(gguf)), options.repeats, report)
        report.add(**ratios("llamacpp", ours, theirs))
    if "vllm" in peers:
        with tempfile.TemporaryDirectory() as folder:
            weights = Path(folder) / "smollm2"
            export_safetensors(gguf, weights, "bfloat16")
            theirs = run("vllm", lambda: vllm(weights), options.repeats, report)
        report.add(**ratios("vllm", ours, theirs))
    print(report.line())


if __name__ == "__main__":
    main()
