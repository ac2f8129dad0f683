"""What the users of a worker notice when its L3 breaks while 32 requests run; the worker has its shipped defaults.

    uv run python -m benchmarks.faults_l3 [--faults killed,hung,master,network]

Faults: the store's only node is killed (SIGKILL), it hangs (SIGSTOP), the master is killed, the network drops every
packet to and from both. For each: sixteen prompts are made hits in L3 (``l3_hits_before`` of their requests came from
there), L1 and L2 are flushed, and these and sixteen new prompts are asked at once, the fault coming in their midst.
Then it is repaired, and the sixteen are asked until they are hits in L3 again (``l3_hits_after_recovery``, and the
seconds until then).

``failed``: requests without a whole answer. ``wrong``: answers that differ from those of a worker without any cache
(greedy, float32). ``worst_added_s``: the most that a request took longer under the fault than, among the same 32, on
the worker without any cache, which computes everything at once; the least of two such rounds, because the machine has
other work too. ``deadline_s``: the longest that the worker waits for L3. The plain keys are sums or worst cases over
the faults; ``<fault>_<key>`` is each one's own.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

import httpx
from moonpool_worker.cache.store_tier.options import StoreOptions

from benchmarks.harness import own_network
from benchmarks.harness.admin import Admin
from benchmarks.harness.client import Timing, complete
from benchmarks.harness.report import Report, say
from benchmarks.harness.servers.moonpool import moonpool
from benchmarks.harness.servers.process import Server
from tests.mooncake_fixture import MiB, RunningMooncake, running_mooncake

HALF, TOKENS, ANSWER = 16, 64, 4
TENANT = "faults"
#: From the first request to the fault: some fetches are over by then, some are under way, some have not begun.
DELAY = 0.05


def prompt(seed: int) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(100, 40_000) for _ in range(TOKENS + 1)]


@dataclass(frozen=True, slots=True)
class Round:
    """``timings``: None for a request that failed."""

    timings: list[Timing | None]

    @property
    def failed(self) -> int:
        return sum(timing is None for timing in self.timings)

    @property
    def l3_hits(self) -> int:
        return sum(timing is not None and timing.tiers.get("l3_tokens", 0) > 0 for timing in self.timings)

    def wrong(self, answers: list[str]) -> int:
        pairs = zip(self.timings, answers, strict=True)
        return sum(timing is not None and timing.text != answer for timing, answer in pairs)

    def added(self, other: Round) -> float:
        """The most that a request took longer than in the other round."""
        pairs = zip(self.timings, other.timings, strict=True)
        return max((ours.last_token - theirs.last_token for ours, theirs in pairs if ours and theirs), default=0.0)


def ask(server: Server, prompts: list[list[int]], disturb: Callable[[], None] | None = None) -> Round:
    """All prompts at once, and ``disturb`` shortly after."""

    async def one(client: httpx.AsyncClient, tokens: list[int]) -> Timing | None:
        try:
            return await complete(client, server.model, tokens, ANSWER)
        except (httpx.HTTPError, RuntimeError) as failure:
            say(f"failed: {failure}")
            return None

    async def all_of_them() -> list[Timing | None]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as client:
            tasks = [asyncio.create_task(one(client, tokens)) for tokens in prompts]
            if disturb is not None:
                await asyncio.sleep(DELAY)
                await asyncio.to_thread(disturb)
            return list(await asyncio.gather(*tasks))

    return Round(asyncio.run(all_of_them()))


class Faults:
    """What breaks a Mooncake, and what repairs it."""

    def __init__(self, mooncake: RunningMooncake) -> None:
        self._mooncake = mooncake

    def killed(self) -> tuple[Callable[[], None], Callable[[], None]]:
        return lambda: self._mooncake.kill("store"), self._mooncake.start_store

    def hung(self) -> tuple[Callable[[], None], Callable[[], None]]:
        def repair() -> None:
            self._mooncake.signal("store", signal.SIGCONT)
            self._mooncake.wait_for_capacity(60)

        return lambda: self._mooncake.signal("store", signal.SIGSTOP), repair

    def master(self) -> tuple[Callable[[], None], Callable[[], None]]:
        def repair() -> None:
            self._mooncake.start_master()
            self._mooncake.wait_for_capacity(60)

        return lambda: self._mooncake.kill("master"), repair

    def network(self) -> tuple[Callable[[], None], Callable[[], None]]:
        ports = [port for name in ("master", "store") for port in own_network.listening_ports(self._mooncake.pid(name))]

        def repair() -> None:
            own_network.restore()
            self._mooncake.wait_for_capacity(60)

        return lambda: own_network.drop(ports), repair


class Trial:
    """One fault, on a worker that has seen the faults before it."""

    def __init__(self, name: str, number: int, server: Server, plain: Server) -> None:
        self._name = name
        self._server, self._plain = server, plain
        self._admin = Admin(server)
        self._hits = [prompt(place) for place in range(HALF)]
        fresh = [prompt(1000 * number + place) for place in range(HALF)]
        #: One of each in turn: none of the two kinds is served before the other.
        self._prompts = [tokens for pair in zip(self._hits, fresh, strict=True) for tokens in pair]

    def run(self, inject: Callable[[], None], repair: Callable[[], None], report: Report) -> None:
        name = self._name
        without = [ask(self._plain, self._prompts) for _ in range(2)]
        answers = [timing.text if timing else "" for timing in without[0].timings]
        before = self._until_hits()
        self._admin.flush("l1", "l2")
        say(f"{name}: {before.l3_hits} of {HALF} come from L3; breaking it")
        during = ask(self._server, self._prompts, inject)
        say(f"{name}: repairing it")
        repair()
        started = time.monotonic()
        again = self._until_hits()
        rounds = (before, during, again)
        figures: dict[str, float | int] = {
            "failed": sum(each.failed for each in rounds),
            "wrong": before.wrong(answers[::2]) + during.wrong(answers) + again.wrong(answers[::2]),
            "worst_added_s": min(during.added(each) for each in without),
            "l3_hits_before": before.l3_hits,
            "l3_hits_during": during.l3_hits,
            "l3_hits_after_recovery": again.l3_hits,
            "recovery_s": time.monotonic() - started,
        }
        say(f"{name}: {figures}")
        report.add(**{f"{name}_{key}": value for key, value in figures.items()})

    def _until_hits(self, seconds: float = 60) -> Round:
        """Ask as users would, and look now and then whether L3 has it all."""
        deadline = time.monotonic() + seconds
        while True:
            ask(self._server, self._hits)
            self._admin.wait_until_written()
            self._admin.flush("l1", "l2")
            again = ask(self._server, self._hits)
            if again.l3_hits == HALF or time.monotonic() > deadline:
                return again
            time.sleep(1)


def measure(faults: list[str], report: Report) -> None:
    with ExitStack() as stack:
        mooncake = stack.enter_context(running_mooncake({TENANT: 512 * MiB}, segment=512 * MiB))
        flags = ("--dtype", "float32")
        server = stack.enter_context(moonpool(*flags, "--l3-master", mooncake.master, "--l3-tenant", TENANT))
        plain = stack.enter_context(moonpool(*flags, "--no-prefix-caching"))
        Admin(server).wait_for_store()
        for each in (server, plain):
            ask(each, [prompt(-1 - number) for number in range(2 * HALF)])
        for number, name in enumerate(faults, 1):
            inject, repair = getattr(Faults(mooncake), name)()
            Trial(name, number, server, plain).run(inject, repair, report)
    figures = report.figures
    for key in ("failed", "wrong", "l3_hits_before", "l3_hits_after_recovery"):
        report.add(**{key: sum(int(figures[f"{name}_{key}"] or 0) for name in faults)})
    report.add(
        worst_added_s=max(float(figures[f"{name}_worst_added_s"] or 0) for name in faults),
        deadline_s=StoreOptions().timeout_limit,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", default="killed,hung,master,network")
    options = parser.parse_args()
    faults = options.faults.split(",")
    report = Report("faults_l3")
    try:
        own_network.enter()
    except own_network.NoNetwork as reason:
        if "network" in faults:
            faults.remove("network")
            report.add(network_failed=None, network_why=str(reason))
    measure(faults, report)
    print(report.line())


if __name__ == "__main__":
    main()
