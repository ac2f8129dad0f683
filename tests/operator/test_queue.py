"""The work queue: bursts coalesce, one reconcile per key at a time, failures back off."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from moonpool_operator.clients.kube import ApiError
from moonpool_operator.handlers.wake import References, after_child, after_service, after_store
from moonpool_operator.queue import Key, WorkQueue

KEY = Key("InferenceService", "ns", "chat")


class Recorder:
    def __init__(self, *answers: object, seconds: float = 0.0) -> None:
        self.answers, self.seconds = list(answers), seconds
        self.calls: list[Key] = []
        self.times: list[float] = []
        self.at_once = self.most_at_once = 0

    async def __call__(self, key: Key) -> float | None:
        self.calls.append(key)
        self.times.append(asyncio.get_running_loop().time())
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await asyncio.sleep(self.seconds)
        self.at_once -= 1
        answer = self.answers.pop(0) if self.answers else None
        if isinstance(answer, Exception):
            raise answer
        return answer  # type: ignore[return-value]


async def until(test: Callable[[], bool]) -> None:
    """Wait for what must come; how soon is the machine's affair."""
    async with asyncio.timeout(20):
        while not test():  # noqa: ASYNC110 (what is waited for has no event)
            await asyncio.sleep(0.005)


async def test_a_burst_is_one_reconcile() -> None:
    record = Recorder()
    queue = WorkQueue(record, settle=0.01)
    for _ in range(100):
        queue.wake(KEY)
    await until(lambda: bool(record.calls))
    await asyncio.sleep(0.05)
    assert record.calls == [KEY]


async def test_wakes_during_a_reconcile_make_one_more_and_never_two_at_once() -> None:
    record = Recorder(seconds=0.3)
    queue = WorkQueue(record, settle=0.001)
    queue.wake(KEY)
    await until(lambda: record.at_once == 1)
    for _ in range(10):
        queue.wake(KEY)
    await until(lambda: len(record.calls) == 2 and record.at_once == 0)
    await asyncio.sleep(0.05)
    assert len(record.calls) == 2 and record.most_at_once == 1


async def test_keys_do_not_wait_for_each_other() -> None:
    record = Recorder(seconds=1.0)
    queue = WorkQueue(record, settle=0.001)
    for i in range(10):
        queue.wake(Key("KVStore", "ns", str(i)))
    await until(lambda: record.at_once == 10)


async def test_an_answer_asks_for_another_look_and_a_sooner_wake_wins() -> None:
    record = Recorder(0.05, 600.0)
    queue = WorkQueue(record, settle=0.001)
    queue.wake(KEY)
    await until(lambda: len(record.calls) == 2 and record.at_once == 0)
    queue.wake(KEY)
    await until(lambda: len(record.calls) == 3)
    await queue.close()


async def test_failures_back_off_and_conflicts_do_not() -> None:
    record = Recorder(RuntimeError("x"), RuntimeError("x"), ApiError(409, "Conflict", "changed"))
    queue = WorkQueue(record, settle=0.001, first_backoff=0.5)
    queue.wake(KEY)
    await until(lambda: len(record.calls) == 4)
    first, second, third, fourth = record.times
    assert second - first >= 0.49
    assert third - second >= 0.99
    # A third failure in a row would have waited 2 s.
    assert fourth - third < 1.8


def body(name: str, store: str = "", **metadata: object) -> dict:
    spec = {"cache": {"l3": {"kvStoreRef": {"name": store}}}} if store else {}
    return {"metadata": {"name": name, "namespace": "ns", **metadata}, "spec": spec}


def names_of(keys: list[Key]) -> list[str]:
    return [f"{key.kind}/{key.name}" for key in keys]


def test_who_is_woken() -> None:
    references = References()
    assert names_of(after_service(references, None, body("chat", "kv"))) == ["InferenceService/chat", "KVStore/kv"]
    assert names_of(after_store(references, body("kv"))) == ["KVStore/kv", "InferenceService/chat"]
    moved = names_of(after_service(references, "MODIFIED", body("chat", "kv2")))
    assert moved == ["InferenceService/chat", "KVStore/kv", "KVStore/kv2"]
    pod = body("p", labels={"moonpool.dev/service": "chat"}, annotations={"moonpool.dev/granted-tenant": "t"})
    assert names_of(after_child(references, "MODIFIED", pod)) == ["InferenceService/chat"]
    assert names_of(after_child(references, "DELETED", pod)) == ["InferenceService/chat", "KVStore/kv2"]
    assert names_of(after_service(references, "DELETED", body("chat"))) == ["InferenceService/chat", "KVStore/kv2"]
    assert names_of(after_store(references, body("kv2"))) == ["KVStore/kv2"]
