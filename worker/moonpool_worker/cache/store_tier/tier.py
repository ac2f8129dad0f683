"""L3 as the engine sees it: fetches that end by themselves, puts that never wait, and a client that may die.

All work is done in :meth:`StoreTier.poll`, which never blocks. Only :meth:`StoreTier.close` waits, up to a deadline.
A slot that was lent to the client process is touched by nobody else until the process has answered for it or has been
killed and reaped.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moonpool_worker.cache.block_header import Mismatch, key_digest
from moonpool_worker.cache.host_tier import HostTier
from moonpool_worker.cache.prefix_index import Node
from moonpool_worker.cache.stats import StoreCounters
from moonpool_worker.cache.store_tier import breaker as breaking
from moonpool_worker.cache.store_tier import messages
from moonpool_worker.cache.store_tier.client_process import ClientProcess
from moonpool_worker.cache.store_tier.codes import NO_SPACE, NOT_FOUND, NOT_REGISTERED, OVER_QUOTA, describe, is_fault
from moonpool_worker.cache.store_tier.fetch import Call, Fetch
from moonpool_worker.cache.store_tier.keys import store_key
from moonpool_worker.cache.store_tier.negative_cache import NegativeCache
from moonpool_worker.cache.store_tier.options import StoreOptions

#: Put calls that may be under way at once: one is written while the next waits in the process.
_PUTS_IN_FLIGHT = 2


@dataclass(frozen=True, slots=True)
class StoreState:
    """``state``: off (no L3), closed (no grant), opening, open or failing. ``error``: the last trouble, in words."""

    state: str
    tenant: str = ""
    master: str = ""
    error: str = ""


class StoreTier:
    """One tenant of one store at a time, over the slots of ``host``.

    ``mismatches`` counts what came back from the store and was not the block asked for.
    """

    def __init__(
        self,
        host: HostTier,
        options: StoreOptions,
        counters: StoreCounters,
        mismatches: Counter[str],
        clock: Callable[[], float] = time.monotonic,
        spawn: Callable[[int, dict[str, str]], ClientProcess] = ClientProcess,
    ) -> None:
        self._host = host
        self._options = options
        self._counters = counters
        self._mismatches = mismatches
        self._clock = clock
        self._spawn = spawn
        self._namespace = self._tenant = self._master = ""
        self._error = ""
        self._process: ClientProcess | None = None
        self._ready = False
        # Raised with each new client and after each outage: the store may have come back empty.
        self._generation = 0
        self._ids = itertools.count(1)
        self._calls: dict[int, Call] = {}
        self._fetches: set[Fetch] = set()
        self._puts: deque[Node] = deque()
        self._puts_paused_until = 0.0
        self._restart_at = 0.0
        self._restart_pause = options.restart_pause
        self._absent = NegativeCache(ttl=options.negative_ttl)
        self._breaker = breaking.Breaker(options.breaker_faults, options.breaker_pause, options.breaker_max_pause)
        # The queue pins slots: it may hold a quarter of L2, no more.
        self._put_limit = max(1, min(options.put_queue, host.num_slots // 4))

    # -- opening and closing -----------------------------------------------------------------------------------

    @property
    def state(self) -> StoreState:
        if not self._master:
            return StoreState("closed")
        if self._ready and self._breaker.state != breaking.OPEN:
            state = "open"
        elif self._error:
            state = "failing"
        else:
            state = "opening"
        return StoreState(state, self._tenant, self._master, self._error)

    @property
    def breaker_state(self) -> str:
        return self._breaker.state

    @property
    def client_pid(self) -> int:
        return self._process.pid if self._process else 0

    @property
    def queued_puts(self) -> int:
        return len(self._puts)

    @property
    def active_fetches(self) -> int:
        return len(self._fetches)

    @property
    def quarantined_slots(self) -> int:
        return sum(len(call.slots) for call in self._calls.values() if call.fetch is not None and call.fetch.done)

    def open(self, namespace: str, tenant: str, master: str) -> None:
        """Begin to open; :attr:`state` tells the rest. The same target again is nothing; another closes first."""
        if (namespace, tenant, master) == (self._namespace, self._tenant, self._master):
            return
        self.close()
        self._namespace, self._tenant, self._master = namespace, tenant, master
        self._restart_pause = self._options.restart_pause
        self._start(self._clock())

    def close(self) -> None:
        """Return when the client process is gone: closed by its own hand, or killed at the deadline."""
        self._drop_puts("closed")
        if self._process is not None:
            self._close_process(self._process)
            self._lose_calls("closed")
        self._process, self._ready = None, False
        for fetch in list(self._fetches):
            self._finish(fetch, "closed")
        self._namespace = self._tenant = self._master = self._error = ""
        self._absent.clear()
        self._breaker.reset()

    def _close_process(self, process: ClientProcess) -> None:
        if self._ready:
            deadline = self._clock() + self._options.close_timeout
            closing = next(self._ids)
            process.send(messages.Close(closing))
            alive = True
            while alive and self._clock() < deadline:
                process.wait_readable(deadline - self._clock())
                replies, alive = process.receive()
                for reply in replies:
                    if reply.id == closing:
                        alive = False
                    else:
                        self._take_reply(reply)
            process.wait_exit(max(0.0, min(1.0, deadline - self._clock())))
        process.kill()

    # -- fetching ----------------------------------------------------------------------------------------------

    def start_fetch(self, chain: list[bytes], first: int) -> Fetch | None:
        """Ask for the pages of ``chain`` from ``first`` on; None when L3 cannot help now or has not got them."""
        now = self._clock()
        if not self._ready or not self._breaker.allows(len(self._calls)):
            return None
        stop = min(len(chain), first + messages.MAX_KEYS)
        for position in range(first, stop):
            if self._absent.contains(chain[position], now):
                self._counters.negative_hits += 1
                stop = position
                break
        wanted = stop - first
        if wanted < max(1, self._options.min_pages):
            return None
        fetch = Fetch(chain, first, wanted, now, now + self._patience(wanted))
        # What is before it in L2 must still be there when it arrives.
        for digest in chain[:first]:
            node = self._host.index.get(0, digest)
            if node is not None:
                self._host.index.ref(node)
                fetch.held.append(node)
        self._fetches.add(fetch)
        call = self._send("exist", lambda number: messages.Exist(number, chain[first:stop]), fetch)
        call.positions = list(range(first, stop))
        return fetch

    def drop(self, fetch: Fetch) -> None:
        """The request does not wait any more, or has been admitted: let go of what was held for it."""
        if not fetch.done:
            self._finish(fetch, "cancelled")
        held, fetch.held = fetch.held, []
        for node in held:
            self._host.release(node)

    def _patience(self, pages: int) -> float:
        return self._options.timeout_base + pages * self._options.timeout_per_page

    def _take_exist(self, call: Call, reply: messages.Reply) -> None:
        fetch = call.fetch
        self._counters.exist_calls += 1
        self._counters.exist_seconds += reply.seconds
        fault = self._judge(reply, self._counters.exist_errors)
        if fetch is None:
            if not fault:
                self._breaker.probe_succeeded()
            return
        fetch.calls -= 1
        if fetch.done:
            return
        if fault:
            self._finish(fetch, "failed")
            return
        found = next((i for i, code in enumerate(reply.codes) if code != 1), len(reply.codes))
        if found < len(call.positions):
            self._absent.add(fetch.chain[call.positions[found]], self._clock())
        if found < max(1, self._options.min_pages):
            self._finish(fetch, "absent")
            return
        fetch.wanted = found
        # Counted anew: between two polls lies a whole step of the engine, which is not the store's fault.
        fetch.deadline = self._clock() + self._patience(found)
        self._send_gets(fetch)

    def _send_gets(self, fetch: Fetch) -> None:
        positions = list(range(fetch.first, fetch.first + fetch.wanted))
        size = self._options.batch_pages
        for start in range(0, len(positions), size):
            batch = positions[start : start + size]
            slots = self._borrow(len(batch))
            if slots:
                batch = batch[: len(slots)]
                hashes = [fetch.chain[position] for position in batch]
                offsets = [self._host.offset(0, slot) for slot in slots]
                call = self._send("get", self._get_request(hashes, offsets), fetch)
                call.positions, call.slots = batch, slots
            if len(slots) < size:
                break
        if not fetch.calls:
            self._finish(fetch, "no room")

    def _get_request(self, hashes: list[bytes], offsets: list[int]) -> Callable[[int], messages.Request]:
        return lambda number: messages.Get(number, hashes, offsets, self._host.object_bytes(0))

    def _borrow(self, count: int) -> list[int]:
        slots: list[int] = []
        while len(slots) < count and (slot := self._host.take_slot(0)) is not None:
            slots.append(slot)
        self._host.lent += len(slots)
        return slots

    def _take_get(self, call: Call, reply: messages.Reply) -> None:
        fetch = call.fetch
        assert fetch is not None
        self._counters.get_calls += 1
        self._counters.get_seconds += reply.seconds
        fault = self._judge(reply, self._counters.get_errors)
        if not fault:
            self._recovered()
        codes = reply.codes if len(reply.codes) == len(call.slots) else [-1] * len(call.slots)
        self._host.lent -= len(call.slots)
        for position, slot, code in zip(call.positions, call.slots, codes, strict=True):
            if code == self._host.object_bytes(0):
                self._counters.get_blocks += 1
                self._counters.get_bytes += code
                self._adopt(fetch, position, slot)
            else:
                if code in (NOT_FOUND, 0):
                    self._absent.add(fetch.chain[position], self._clock())
                elif code > 0:
                    self._mismatches["l3.length"] += 1
                self._host.give_slot(0, slot)
        fetch.calls -= 1
        if not fetch.done and not fetch.calls:
            complete = len(fetch.fetched) == fetch.wanted
            self._finish(fetch, "complete" if complete else "failed" if fault and not fetch.fetched else "partial")

    def _adopt(self, fetch: Fetch, position: int, slot: int) -> None:
        digest = fetch.chain[position]
        node = self._host.index.get(0, digest)
        if node is not None:
            # Computed and published while it was on its way.
            self._host.give_slot(0, slot)
            self._host.index.ref(node)
        else:
            parent = fetch.chain[position - 1] if position else None
            name = key_digest(store_key(self._namespace, digest))
            adopted = self._host.adopt(0, slot, digest, parent, position, name)
            if isinstance(adopted, Mismatch):
                self._mismatches[f"l3.{adopted.value}"] += 1
                self._host.give_slot(0, slot)
                return
            node = adopted
            node.stored = self._generation
        if fetch.done:
            self._counters.late_blocks += 1
            self._host.release(node)
            return
        fetch.fetched.add((0, digest))
        fetch.held.append(node)

    def _finish(self, fetch: Fetch, outcome: str) -> None:
        fetch.done, fetch.outcome = True, outcome
        self._fetches.discard(fetch)
        self._counters.fetches[outcome] += 1
        self._counters.fetch_seconds += self._clock() - fetch.started

    # -- putting -----------------------------------------------------------------------------------------------

    def put(self, nodes: Sequence[Node]) -> None:
        """Queue resident blocks for the store; dropped, and counted, when L3 is not keeping up or not there."""
        reason = self._refuses_puts()
        if reason:
            self._counters.put_dropped[reason] += len(nodes)
            return
        dropped = len(nodes) - self._queue(nodes)
        if dropped:
            self._counters.put_dropped["queue full"] += dropped

    def offer(self, nodes: Sequence[Node]) -> None:
        """Blocks were used again: queue those that the store is not known to have, as far as there is room.

        They were published before L3 was open, were dropped then, or went down with a store.
        """
        if not self._refuses_puts():
            self._queue([node for node in nodes if node.stored != self._generation])

    def _refuses_puts(self) -> str:
        if not self._ready:
            return "not open"
        if self._breaker.state == breaking.OPEN:
            return "breaker"
        return "refused" if self._clock() < self._puts_paused_until else ""

    def _queue(self, nodes: Sequence[Node]) -> int:
        taken = nodes[: max(0, self._put_limit - len(self._puts))]
        for node in taken:
            self._host.index.ref(node)
            node.stored = self._generation
            self._puts.append(node)
        self._send_puts()
        return len(taken)

    def _send_puts(self) -> None:
        in_flight = sum(call.kind == "put" for call in self._calls.values())
        while self._puts and self._ready and in_flight < _PUTS_IN_FLIGHT and self._breaker.allows(len(self._calls)):
            count = min(len(self._puts), self._options.put_batch)
            nodes = [self._puts.popleft() for _ in range(count)]
            call = self._send("put", self._put_request(nodes))
            call.nodes = nodes
            in_flight += 1

    def _put_request(self, nodes: list[Node]) -> Callable[[int], messages.Request]:
        hashes = [node.digest for node in nodes]
        offsets = [self._host.offset(node.group, node.slot) for node in nodes]
        return lambda number: messages.Put(number, hashes, offsets, self._host.object_bytes(0))

    def _take_put(self, call: Call, reply: messages.Reply) -> None:
        self._counters.put_calls += 1
        self._counters.put_seconds += reply.seconds
        if not self._judge(reply, self._counters.put_errors):
            self._recovered()
        codes = reply.codes if len(reply.codes) == len(call.nodes) else [-1] * len(call.nodes)
        for node, code in zip(call.nodes, codes, strict=True):
            if code == 0:
                self._counters.put_blocks += 1
                self._counters.put_bytes += self._host.object_bytes(0)
                self._absent.discard(node.digest)
            else:
                node.stored = 0
            self._host.release(node)
        refusals = [code for code in reply.codes if code in (OVER_QUOTA, NOT_REGISTERED, NO_SPACE)]
        if refusals:
            self._error = f"put refused: {describe(refusals[0])}"
            self._puts_paused_until = self._clock() + self._options.refused_put_pause
            self._drop_puts("refused")
        elif 0 in reply.codes and self._breaker.state == breaking.CLOSED:
            self._error = ""

    def _drop_puts(self, reason: str) -> None:
        if self._puts:
            self._counters.put_dropped[reason] += len(self._puts)
        while self._puts:
            node = self._puts.popleft()
            node.stored = 0
            self._host.release(node)

    # -- the client process ------------------------------------------------------------------------------------

    def fileno(self) -> int | None:
        """A descriptor that becomes readable when :meth:`poll` has something to take in."""
        return self._process.fileno() if self._process else None

    def poll(self) -> None:
        """Take in answers, keep deadlines, restart the client, send what waits. Never blocks."""
        if not self._master:
            return
        now = self._clock()
        if self._process is None:
            if now >= self._restart_at:
                self._start(now)
        else:
            replies, alive = self._process.receive()
            for reply in replies:
                self._take_reply(reply)
            if self._process is not None and not alive:
                self._lose("died")
            elif any(now >= call.deadline for call in self._calls.values()):
                late = next(call.kind for call in self._calls.values() if now >= call.deadline)
                self._lose(f"{late} timed out")
        for fetch in [fetch for fetch in self._fetches if now >= fetch.deadline]:
            self._finish(fetch, "deadline")
            self._fault("fetches take too long")
        if self._ready and self._breaker.probe_due(now) and not any(c.kind == "probe" for c in self._calls.values()):
            self._send("probe", lambda number: messages.Exist(number, [bytes(32)]))
        if self._breaker.state == breaking.OPEN:
            self._drop_puts("breaker")
        self._send_puts()

    def _start(self, now: float) -> None:
        options = self._options
        try:
            self._process = self._spawn(self._host.fd, options.environment)
        except OSError as failure:
            self._error = f"cannot start the store client: {failure}"
            self._schedule_restart(now)
            return
        self._counters.client_starts += 1
        self._send(
            "open",
            lambda number: messages.Open(
                number,
                self._namespace,
                self._tenant,
                self._master,
                options.hostname,
                options.protocol,
                options.device,
                options.local_buffer_bytes,
                self._host.fd,
                self._host.nbytes,
            ),
            timeout=options.open_timeout,
        )

    def _send(
        self,
        kind: str,
        build: Callable[[int], messages.Request],
        fetch: Fetch | None = None,
        timeout: float | None = None,
    ) -> Call:
        assert self._process is not None
        now = self._clock()
        number = next(self._ids)
        call = Call(kind, now, now + (self._options.call_timeout if timeout is None else timeout), fetch)
        self._calls[number] = call
        if fetch is not None:
            fetch.calls += 1
        self._process.send(build(number))
        return call

    def _take_reply(self, reply: messages.Reply) -> None:
        call = self._calls.pop(reply.id, None)
        if call is None:
            return
        match call.kind:
            case "open":
                self._take_open(reply)
            case "exist" | "probe":
                self._take_exist(call, reply)
            case "get":
                self._take_get(call, reply)
            case "put":
                self._take_put(call, reply)

    def _take_open(self, reply: messages.Reply) -> None:
        code = reply.codes[0]
        if code != 0:
            self._lose(f"set-up failed: {reply.error or describe(code)}", "set-up failed")
            return
        self._ready = True
        self._generation += 1
        self._error = ""
        self._restart_pause = self._options.restart_pause

    def _judge(self, reply: messages.Reply, errors: Counter[str]) -> bool:
        """Count the codes of a reply and tell the breaker; True when the store or the way to it is broken."""
        bad = Counter(code for code in reply.codes if code < 0)
        for code, count in bad.items():
            errors[str(code)] += count
        faults = [code for code in bad if is_fault(code)]
        if reply.error:
            errors["exception"] += 1
        if not faults and not reply.error:
            return False
        self._fault(reply.error or f"store: {describe(faults[0])}")
        return True

    def _recovered(self) -> None:
        # Only a read or a write says so: the master answers "exist" for a store that hangs.
        if self._breaker.state == breaking.HALF_OPEN:
            self._error = ""
            self._generation += 1
        self._breaker.succeeded()

    def _fault(self, error: str) -> None:
        self._error = error
        before = self._breaker.opened
        self._breaker.failed(self._clock())
        self._counters.breaker_opened += self._breaker.opened - before

    def _lose(self, error: str, reason: str = "") -> None:
        """The client is dead, hung or useless: kill it, take back what it had, start another later."""
        process, self._process, self._ready = self._process, None, False
        if process is not None:
            code = process.kill()
            if not reason and error == "died":
                error = f"died with code {code}"
        self._counters.client_losses[reason or error.partition(" with")[0]] += 1
        self._error = f"store client {error}"
        if self._calls:
            self._fault(self._error)
        self._lose_calls("failed")
        self._drop_puts("not open")
        self._schedule_restart(self._clock())

    def _lose_calls(self, outcome: str) -> None:
        """The process is gone, so nobody writes to the slots it had."""
        calls, self._calls = list(self._calls.values()), {}
        for call in calls:
            self._host.lent -= len(call.slots)
            for slot in call.slots:
                self._host.give_slot(0, slot)
            for node in call.nodes:
                node.stored = 0
                self._host.release(node)
            if call.fetch is not None:
                call.fetch.calls -= 1
                if not call.fetch.done:
                    self._finish(call.fetch, outcome)

    def _schedule_restart(self, now: float) -> None:
        self._restart_at = now + self._restart_pause
        self._restart_pause = min(2 * self._restart_pause, self._options.max_restart_pause)
