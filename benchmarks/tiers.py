"""What a prefix of 2,000 tokens costs from each tier of the cache, on the real model and a real Mooncake store.

    uv run python -m benchmarks.tiers [--prompts 3]

``ttft_cold_s``, ``ttft_l1_s``, ``ttft_l2_s`` and ``ttft_l3_s`` are the time to the first token of a prompt that nobody
has computed, and of the same one from L1, from L2 (L1 flushed) and from L3 (L1 and L2 flushed); ``ttft_after_crash_s``
of a worker whose engine was killed with SIGKILL and started again (L2 is kept), ``ttft_after_pod_loss_s`` of a fresh
worker (L3). All are medians over the prompts; ``tokens_*`` are the prompt tokens that came from the tier, summed over
them, of ``tokens_wanted`` that could have (each prompt is read five times from L2 and from L3).

Bytes per second, each the best of the run, in memory that was touched before: ``l2_read_gbs`` and ``l2_write_gbs`` as
the worker counts its copies between L1 and L2 (checks included) beside ``copy_gbs``, one ``copy_`` of the same bytes
between two tensors in this process; ``l3_read_gbs`` from the beginning of a fetch until its last block is checked and
in L2, beside ``bare_get_gbs``, Mooncake's own ``batch_get_into`` of the same objects in a client of its own.
``ratio_l2_copy`` and ``ratio_l3_get`` are ours over theirs. A read from L3 keeps three processes busy at once: beside
other work on two cores its rate is that of the other work.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence

import httpx
from moonpool_worker.cli.barriers import forbid_spinning

from benchmarks.harness.admin import Admin
from benchmarks.harness.client import Timing, complete
from benchmarks.harness.report import Report, say
from benchmarks.harness.servers.moonpool import moonpool
from benchmarks.harness.servers.process import Server
from tests.mooncake_fixture import MiB, RunningMooncake, running_mooncake

TOKENS = 2000
#: Of the reads of a prompt from L2 and from L3: they are short, and any can be held up.
REPEATS = 5
TENANT = "bench"
#: Room for all prompts in every tier.
STORE = 1024 * MiB


def prompt(seed: int) -> list[int]:
    """Token ids that begin like no other prompt, and one more than the prefix: the last token is always computed."""
    source = random.Random(seed)
    return [source.randrange(100, 40_000) for _ in range(TOKENS + 1)]


def ask(server: Server, tokens: list[int]) -> Timing:
    async def once() -> Timing:
        async with httpx.AsyncClient(base_url=server.url, timeout=300) as client:
            return await complete(client, server.model, tokens, 2)

    return asyncio.run(once())


class Figures:
    """Times and tokens by the tier that a prompt was to come from."""

    def __init__(self) -> None:
        self.times: dict[str, list[float]] = {}
        self.tokens: dict[str, int] = {}

    def add(self, name: str, tier: str, timing: Timing) -> None:
        self.times.setdefault(name, []).append(timing.first_token)
        self.tokens[name] = self.tokens.get(name, 0) + timing.tiers.get(f"{tier}_tokens", 0)
        say(f"{name}: {timing.first_token * 1000:.0f} ms, {timing.tiers}")


class Speed:
    """The best rate of a counter of bytes and one of seconds, over single requests."""

    def __init__(self, nbytes: Sequence[str], seconds: Sequence[str]) -> None:
        self._nbytes, self._seconds = nbytes, seconds
        self._last: tuple[float, float] | None = None
        self.best = 0.0
        self.moved = 0

    def look(self, stats: dict) -> None:
        nbytes, seconds = _at(stats, self._nbytes), _at(stats, self._seconds)
        if self._last is not None and nbytes > self._last[0]:
            self.moved = int(nbytes - self._last[0])
            self.best = max(self.best, self.moved / max(seconds - self._last[1], 1e-9))
        self._last = (nbytes, seconds)


def _at(stats: dict, path: Sequence[str]) -> float:
    for name in path:
        stats = stats[name]
    return float(stats)  # type: ignore[arg-type]


def measure(prompts: int, mooncake: RunningMooncake, report: Report) -> None:
    figures = Figures()
    texts = [prompt(100 + number) for number in range(prompts)]
    flags = ("--l3-master", mooncake.master, "--l3-tenant", TENANT)
    reads = Speed(["l2_read_bytes"], ["l2_read_seconds"])
    writes = Speed(["l2_write_bytes"], ["l2_write_seconds"])
    fetches = Speed(["store", "get_bytes"], ["store", "fetch_seconds"])
    with moonpool(*flags) as server:
        admin = Admin(server)
        admin.wait_for_store()
        warm_up(server)
        touch_everything(server, admin)
        for tokens in texts:
            writes.look(admin.stats())
            figures.add("cold", "l1", ask(server, tokens))
            writes.look(admin.stats())
            admin.wait_until_written()
            figures.add("l1", "l1", ask(server, tokens))
            for _ in range(REPEATS):
                admin.flush("l1")
                reads.look(admin.stats())
                figures.add("l2", "l2", ask(server, tokens))
                reads.look(admin.stats())
                admin.flush("l1", "l2")
                fetches.look(admin.stats())
                figures.add("l3", "l3", ask(server, tokens))
                fetches.look(admin.stats())
        # All of them in L2 for the crash: the flushes above were for one at a time.
        for tokens in texts:
            ask(server, tokens)
        compare_copy(reads, writes, report)
        compare_get(admin, mooncake, texts, fetches, report)
        report.add(restart_s=admin.crash())
        admin.wait_for_store()
        warm_up(server)
        for tokens in texts:
            figures.add("after_crash", "l2", ask(server, tokens))
    with moonpool(*flags) as server:
        Admin(server).wait_for_store()
        warm_up(server)
        for tokens in texts:
            figures.add("after_pod_loss", "l3", ask(server, tokens))
    for name, times in figures.times.items():
        report.add(**{f"ttft_{name}_s": statistics.median(times)})
    report.add(tokens_wanted=TOKENS * prompts, **{f"tokens_{name}": count for name, count in figures.tokens.items()})


def warm_up(server: Server) -> None:
    ask(server, prompt(seed=1))


def touch_everything(server: Server, admin: Admin) -> None:
    """Go once through L1 and L2: the kernel's zeroing of new memory is no part of a tier's speed."""
    admin.wait_until_written()
    stats = admin.stats()
    rounds = stats["l2_slots"] // max(1, stats["l2_cached_blocks"]) + 1
    for _ in range(rounds):
        admin.flush("l1", "l2")
        warm_up(server)


def compare_copy(reads: Speed, writes: Speed, report: Report) -> None:
    """One torch copy of as many bytes as a prompt's, beside the worker's copies between L1 and L2."""
    # As the worker's threads: spinning ones would be slower on a machine that has other work.
    forbid_spinning()
    import torch

    source = torch.ones(reads.moved, dtype=torch.uint8)
    target = torch.ones(reads.moved, dtype=torch.uint8)
    plain = 0.0
    for threads in (1, torch.get_num_threads()):
        torch.set_num_threads(threads)
        plain = max(plain, reads.moved / best_of(20, lambda: target.copy_(source)))
    report.add(
        bytes_per_prompt=reads.moved,
        copy_gbs=plain / 1e9,
        l2_read_gbs=reads.best / 1e9,
        l2_write_gbs=writes.best / 1e9,
        ratio_l2_copy=reads.best / plain,
        ratio_l2_write_copy=writes.best / plain,
    )


def compare_get(
    admin: Admin, mooncake: RunningMooncake, texts: list[list[int]], fetches: Speed, report: Report
) -> None:
    """The same objects through a bare Mooncake client, in a process of its own."""
    from moonpool_worker.cache.hash_chain import hash_chain
    from moonpool_worker.cache.store_tier.keys import store_key

    report_of_worker = admin.namespace()
    granularity = report_of_worker["inputs"]["geometry"]["prefix_granularity"]
    keys = [
        store_key(report_of_worker["namespace"], link) for tokens in texts for link in hash_chain(tokens, granularity)
    ]
    command = [sys.executable, "-m", "benchmarks.harness.bare_get", mooncake.master, TENANT, str(len(texts))]
    done = subprocess.run(command, input="\n".join(keys), capture_output=True, text=True, timeout=120, check=True)
    bare = float(done.stdout.split()[-1])
    report.add(bare_get_gbs=bare / 1e9, l3_read_gbs=fetches.best / 1e9, ratio_l3_get=fetches.best / bare)


def best_of(times: int, work: object) -> float:
    """Seconds of the fastest of several runs."""
    assert callable(work)
    best = float("inf")
    for _ in range(times):
        started = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - started)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=3)
    options = parser.parse_args()
    report = Report("tiers")
    with running_mooncake({TENANT: STORE}, segment=STORE) as mooncake:
        measure(options.prompts, mooncake, report)
    print(report.line())


if __name__ == "__main__":
    main()
