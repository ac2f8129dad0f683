"""The life of the L3 client: started, measured, watched, killed when it hangs, and started again.

All work is done in :meth:`Client.poll`, which never blocks. Only :meth:`Client.close` waits, up to a deadline.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from moonpool_worker.cache.stats import StoreCounters
from moonpool_worker.cache.store_tier import breaker as breaking
from moonpool_worker.cache.store_tier import messages
from moonpool_worker.cache.store_tier.calls import Call
from moonpool_worker.cache.store_tier.client_process import ClientProcess
from moonpool_worker.cache.store_tier.codes import describe, is_fault
from moonpool_worker.cache.store_tier.options import StoreOptions
from moonpool_worker.cache.store_tier.rates import Rates


@dataclass(frozen=True, slots=True)
class StoreState:
    """``state``: off (no L3), closed (no grant), opening, open or failing. ``error``: the last trouble, in words."""

    state: str
    tenant: str = ""
    master: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True)
class Target:
    """What is opened: one namespace in one tenant of one store."""

    namespace: str
    tenant: str
    master: str


class Arena(Protocol):
    """The memory that the client reads and writes: ``nbytes`` behind ``fd``."""

    @property
    def fd(self) -> int: ...

    nbytes: int


class Client:
    """At most one client process at a time, and the calls that it has not answered.

    ``on_gone(reason)`` is called when there is none any more, before what it had lent is given back.
    """

    def __init__(
        self,
        arena: Arena,
        options: StoreOptions,
        counters: StoreCounters,
        rates: Rates,
        clock: Callable[[], float] = time.monotonic,
        spawn: Callable[[int, dict[str, str]], ClientProcess] = ClientProcess,
    ) -> None:
        self.now = clock
        self.target: Target | None = None
        self.ready = False
        self.error = ""
        #: Raised with each new client and after each outage: the store may have come back empty.
        self.generation = 0
        #: When the process last answered anything.
        self.last_answer = 0.0
        self.breaker = breaking.Breaker(options.breaker_faults, options.breaker_pause, options.breaker_max_pause)
        self.on_gone: Callable[[str], None] = lambda reason: None
        self._arena = arena
        self._options = options
        self._counters = counters
        self._rates = rates
        self._spawn = spawn
        self._process: ClientProcess | None = None
        self._ids = itertools.count(1)
        self._calls: dict[int, Call] = {}
        self._restart_at = 0.0
        self._restart_pause = options.restart_pause
        #: When the last measurement began; while one runs no other does.
        self._measured_at = 0.0
        self._measuring = False

    # -- opening and closing -----------------------------------------------------------------------------------

    @property
    def state(self) -> StoreState:
        if self.target is None:
            return StoreState("closed")
        open_now = self.ready and self.breaker.state != breaking.OPEN
        state = "open" if open_now else "failing" if self.error else "opening"
        return StoreState(state, self.target.tenant, self.target.master, self.error)

    @property
    def pid(self) -> int:
        return self._process.pid if self._process else 0

    @property
    def quarantined_slots(self) -> int:
        return sum(call.quarantined for call in self._calls.values())

    def open(self, target: Target) -> None:
        """Begin to open; :attr:`state` tells the rest. The same target again is nothing; another closes first."""
        if target == self.target:
            return
        self.close()
        self.target = target
        self._restart_pause = self._options.restart_pause
        self._start(target)

    def close(self) -> None:
        """Return when the client process is gone: closed by its own hand, or killed at the deadline."""
        self.on_gone("closed")
        process, was_ready = self._process, self.ready
        self.ready = False
        if process is not None:
            if was_ready:
                self._ask_to_close(process)
            process.kill()
            self._process = None
            self._lose_calls()
        # An answer that came while it closed may have said otherwise.
        self.ready = False
        self.target = None
        self.error = ""
        self.breaker.reset()
        self._rates.forget_store()

    def _ask_to_close(self, process: ClientProcess) -> None:
        deadline = self.now() + self._options.close_timeout
        closing = next(self._ids)
        process.send(messages.Close(closing))
        alive = True
        while alive and self.now() < deadline:
            process.wait_readable(deadline - self.now())
            replies, alive = process.receive()
            for reply in replies:
                if reply.id == closing:
                    alive = False
                else:
                    self._take(reply)
        process.wait_exit(max(0.0, min(1.0, deadline - self.now())))

    # -- calls -------------------------------------------------------------------------------------------------

    @property
    def accepts(self) -> bool:
        """Whether a read or a write may begin now."""
        return self.ready and self.breaker.allows(len(self._calls))

    def in_flight(self, kind: str) -> int:
        return sum(call.kind == kind for call in self._calls.values())

    def send(self, call: Call, timeout: float | None = None) -> None:
        """Never blocks; there must be a process."""
        assert self._process is not None
        number = next(self._ids)
        call.deadline = self.now() + (self._options.call_timeout if timeout is None else timeout)
        self._calls[number] = call
        self._process.send(call.request(number))

    def judge(self, reply: messages.Reply, errors: Counter[str], certain: bool = False) -> bool:
        """Count the codes of a reply and tell the breaker; True when the store or the way to it is broken."""
        bad = Counter(code for code in reply.codes if code < 0)
        for code, count in bad.items():
            errors[str(code)] += count
        if reply.error:
            errors["exception"] += 1
        faults = [code for code in bad if is_fault(code)]
        if not faults and not reply.error:
            return False
        self.fault(reply.error or f"store: {describe(faults[0])}", certain)
        return True

    def fault(self, error: str, certain: bool = False) -> None:
        """Something is wrong with the store or the way to it; ``certain``: no second opinion is needed."""
        self.error = error
        before = self.breaker.opened
        self.breaker.failed(self.now(), certain)
        self._counters.breaker_opened += self.breaker.opened - before

    def works(self) -> None:
        """A read or a write was answered well. The master says "exists" for a store that hangs: that is no proof."""
        if self.breaker.state == breaking.HALF_OPEN:
            self.error = ""
            self.generation += 1
        self.breaker.succeeded()

    def measure_again(self) -> None:
        """The store is thought to be too slow: see from time to time whether it still is."""
        if self.accepts and not self._measuring and self.now() >= self._measured_at + self._options.measure_again:
            self._measure()

    # -- the process -------------------------------------------------------------------------------------------

    def fileno(self) -> int | None:
        """A descriptor that becomes readable when :meth:`poll` has something to take in."""
        return self._process.fileno() if self._process else None

    def poll(self) -> None:
        """Take in answers, keep deadlines, restart the client, and try a store that was left alone."""
        if self.target is None:
            return
        now = self.now()
        if self._process is None:
            if now >= self._restart_at:
                self._start(self.target)
            return
        replies, alive = self._process.receive()
        for reply in replies:
            self._take(reply)
        if self._process is None:
            return
        late = next((call.kind for call in self._calls.values() if now >= call.deadline), None)
        if not alive:
            self._lose("died")
        elif late is not None:
            self._lose(f"{late} timed out")
        elif self.ready and self.breaker.probe_due(now) and not self._measuring:
            self._measure()

    def _start(self, target: Target) -> None:
        try:
            self._process = self._spawn(self._arena.fd, self._options.environment)
        except OSError as failure:
            self.error = f"cannot start the store client: {failure}"
            self._schedule_restart()
            return
        self._counters.client_starts += 1
        self.send(_OpenCall(self, target, self._arena, self._options), self._options.open_timeout)

    def _take(self, reply: messages.Reply) -> None:
        call = self._calls.pop(reply.id, None)
        if call is not None:
            self.last_answer = self.now()
            call.answered(reply)

    def opened(self, reply: messages.Reply) -> None:
        """The process has set Mooncake up, or has not."""
        code = reply.codes[0]
        if code != 0:
            self._lose(f"set-up failed: {reply.error or describe(code)}", "set-up failed")
        else:
            # Before anybody waits for this store: it may be there and hang.
            self._measure()

    def _measure(self) -> None:
        self._measuring = True
        self._measured_at = self.now()
        self.send(_MeasureCall(self, self._options.measure_bytes))

    def measured(self, reply: messages.Reply) -> None:
        self._measuring = False
        self._counters.measurements += 1
        fault = self.judge(reply, self._counters.measure_errors, certain=True)
        if not fault:
            self.breaker.probe_succeeded()
            if reply.codes[0] == 0 and len(reply.codes) == 3:
                latency, read = (micros / 1e6 for micros in reply.codes[1:])
                self._rates.forget_store()
                self._rates.measured_latency(latency)
                self._rates.measured_read(self._options.measure_bytes, read)
        if not self.ready:
            self.ready = True
            self.generation += 1
            if not fault and self.breaker.state == breaking.CLOSED:
                self.error = ""
            self._restart_pause = self._options.restart_pause

    def measuring_lost(self) -> None:
        self._measuring = False

    def _lose(self, error: str, reason: str = "") -> None:
        """The client is dead, hung or useless: kill it, take back what it had, start another later."""
        process, self._process, self.ready = self._process, None, False
        if process is not None:
            code = process.kill()
            if not reason and error == "died":
                error = f"died with code {code}"
        self._counters.client_losses[reason or error.partition(" with")[0]] += 1
        self.error = f"store client {error}"
        if self._calls:
            self.fault(self.error)
        self._lose_calls()
        self.on_gone("not open")
        self._schedule_restart()

    def _lose_calls(self) -> None:
        calls, self._calls = list(self._calls.values()), {}
        for call in calls:
            call.lost()

    def _schedule_restart(self) -> None:
        self._restart_at = self.now() + self._restart_pause
        self._restart_pause = min(2 * self._restart_pause, self._options.max_restart_pause)


class _OpenCall(Call):
    kind = "open"

    def __init__(self, client: Client, target: Target, arena: Arena, options: StoreOptions) -> None:
        self._client, self._target, self._arena, self._options = client, target, arena, options

    def request(self, number: int) -> messages.Request:
        target, options = self._target, self._options
        return messages.Open(
            number,
            target.namespace,
            target.tenant,
            target.master,
            options.hostname,
            options.protocol,
            options.device,
            options.local_buffer_bytes,
            self._arena.fd,
            self._arena.nbytes,
        )

    def answered(self, reply: messages.Reply) -> None:
        self._client.opened(reply)

    def lost(self) -> None:
        pass  # the client knows: it was it who gave up


class _MeasureCall(Call):
    kind = "measure"

    def __init__(self, client: Client, size: int) -> None:
        self._client, self._size = client, size

    def request(self, number: int) -> messages.Request:
        return messages.Measure(number, self._size)

    def answered(self, reply: messages.Reply) -> None:
        self._client.measured(reply)

    def lost(self) -> None:
        self._client.measuring_lost()
