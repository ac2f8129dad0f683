"""Writes: published blocks on their way to the store, in the background, dropped rather than waited for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from moonpool_worker.cache.host_tier import HostTier
from moonpool_worker.cache.prefix_index import Node
from moonpool_worker.cache.stats import StoreCounters
from moonpool_worker.cache.store_tier import breaker as breaking
from moonpool_worker.cache.store_tier import messages
from moonpool_worker.cache.store_tier.calls import Call
from moonpool_worker.cache.store_tier.client import Client
from moonpool_worker.cache.store_tier.codes import NO_SPACE, NOT_REGISTERED, OVER_QUOTA, describe
from moonpool_worker.cache.store_tier.options import StoreOptions

#: Put calls that may be under way at once: one is written while the next waits in the process.
_IN_FLIGHT = 2


class Puts:
    """A queue of L2 blocks, each pinned until it is written or dropped. ``on_written(group, digest)`` for each."""

    def __init__(
        self,
        client: Client,
        host: HostTier,
        options: StoreOptions,
        counters: StoreCounters,
        on_written: Callable[[int, bytes], None],
    ) -> None:
        self._client = client
        self._host = host
        self._options = options
        self._counters = counters
        self._on_written = on_written
        self._queue: deque[Node] = deque()
        self._under_way = 0
        self._paused_until = 0.0
        # The queue pins slots: it may hold a quarter of L2, no more.
        self._limit = max(1, min(options.put_queue, host.num_slots // 4))

    def __len__(self) -> int:
        """Blocks that are not written yet."""
        return len(self._queue) + self._under_way

    def put(self, nodes: Sequence[Node]) -> None:
        """Queue resident blocks for the store; dropped, and counted, when L3 is not keeping up or not there."""
        reason = self._refuses()
        if reason:
            self._counters.put_dropped[reason] += len(nodes)
            return
        dropped = len(nodes) - self._add(nodes)
        if dropped:
            self._counters.put_dropped["queue full"] += dropped

    def offer(self, nodes: Sequence[Node]) -> None:
        """Blocks were used again: queue those that the store is not known to have, as far as there is room.

        They were published before L3 was open, were dropped then, or went down with a store.
        """
        if not self._refuses():
            self._add([node for node in nodes if node.stored != self._client.generation])

    def send(self) -> None:
        """Hand the process as many calls as it may have."""
        client = self._client
        while self._queue and client.accepts and client.in_flight(_Put.kind) < _IN_FLIGHT:
            nodes = [self._queue.popleft() for _ in range(min(len(self._queue), self._options.put_batch))]
            self._under_way += len(nodes)
            client.send(_Put(self, nodes))

    def poll(self) -> None:
        if self._client.breaker.state == breaking.OPEN:
            self.drop("breaker")
        self.send()

    def drop(self, reason: str) -> None:
        """Forget the queue."""
        if self._queue:
            self._counters.put_dropped[reason] += len(self._queue)
        while self._queue:
            self._give_up(self._queue.popleft())

    def _refuses(self) -> str:
        if not self._client.ready:
            return "not open"
        if self._client.breaker.state == breaking.OPEN:
            return "breaker"
        return "refused" if self._client.now() < self._paused_until else ""

    def _add(self, nodes: Sequence[Node]) -> int:
        taken = nodes[: max(0, self._limit - len(self._queue))]
        for node in taken:
            self._host.index.ref(node)
            node.stored = self._client.generation
            self._queue.append(node)
        self.send()
        return len(taken)

    def _give_up(self, node: Node) -> None:
        node.stored = 0
        self._host.release(node)

    def describe(self, nodes: Sequence[Node], number: int) -> messages.Put:
        host = self._host
        return messages.Put(
            number,
            [node.group for node in nodes],
            [node.digest for node in nodes],
            [host.offset(node.group, node.slot) for node in nodes],
            [host.object_bytes(node.group) for node in nodes],
        )

    def answered(self, nodes: Sequence[Node], reply: messages.Reply) -> None:
        counters, client = self._counters, self._client
        self._under_way -= len(nodes)
        counters.put_calls += 1
        counters.put_seconds += reply.seconds
        if not client.judge(reply, counters.put_errors):
            client.works()
        codes = reply.codes if len(reply.codes) == len(nodes) else [-1] * len(nodes)
        for node, code in zip(nodes, codes, strict=True):
            if code != 0:
                self._give_up(node)
                continue
            counters.put_blocks += 1
            counters.put_bytes += self._host.object_bytes(node.group)
            self._on_written(node.group, node.digest)
            self._host.release(node)
        refusals = [code for code in reply.codes if code in (OVER_QUOTA, NOT_REGISTERED, NO_SPACE)]
        if refusals:
            client.error = f"put refused: {describe(refusals[0])}"
            self._paused_until = client.now() + self._options.refused_put_pause
            self.drop("refused")
        elif 0 in codes and client.breaker.state == breaking.CLOSED:
            client.error = ""

    def lost(self, nodes: Sequence[Node]) -> None:
        self._under_way -= len(nodes)
        for node in nodes:
            self._give_up(node)


class _Put(Call):
    kind = "put"

    def __init__(self, puts: Puts, nodes: list[Node]) -> None:
        self._puts, self._nodes = puts, nodes

    def request(self, number: int) -> messages.Request:
        return self._puts.describe(self._nodes, number)

    def answered(self, reply: messages.Reply) -> None:
        self._puts.answered(self._nodes, reply)

    def lost(self) -> None:
        self._puts.lost(self._nodes)
