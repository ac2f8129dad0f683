"""Published traces of requests as lists of prefix pages.

Mooncake's traces (FAST '25) are JSON lines with one id per 512 tokens; WEKA's Claude Code traces are an archive with
one JSON file per conversation and one id per 64 tokens. In both an id stands for the whole prefix up to its end: equal
ids mean equal text from the beginning (checked: no id of theirs ever follows two different ones).
"""

from __future__ import annotations

import heapq
import json
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MOONCAKE_PAGE = 512


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request: the ids of its whole pages, and its tokens. A last, incomplete page can never be shared."""

    pages: list[int]
    tokens: int


@dataclass(frozen=True, slots=True)
class Trace:
    """``page``: tokens per page."""

    name: str
    page: int
    arrivals: list[Arrival]


def read_trace(path: Path, limit: int | None, conversations: int) -> Trace:
    """The first ``limit`` requests. ``conversations``: how many of an archive's go on at the same time."""
    arrivals = _mooncake(path) if path.suffix == ".jsonl" else _claude_code(path, conversations)
    kept = [arrival for arrival, _ in zip(arrivals, range(limit or 1 << 62), strict=False)]
    if not kept:
        raise ValueError(f"{path} holds no request")
    return Trace(path.name, MOONCAKE_PAGE, kept)


def _mooncake(path: Path) -> Iterator[Arrival]:
    with path.open() as lines:
        for line in lines:
            record = json.loads(line)
            tokens = record["input_length"]
            yield Arrival(record["hash_ids"][: tokens // MOONCAKE_PAGE], tokens)


def _claude_code(path: Path, conversations: int) -> Iterator[Arrival]:
    """All conversations, ``conversations`` of them at a time: when one has ended the next begins.

    Ids are local to a conversation, and KV to a model: a page is (conversation, model, id). The archive knows no
    text in common between conversations, so none is counted.
    """
    numbers: dict[tuple[int, str, int], int] = {}
    with tarfile.open(path) as archive:
        files = (archive.extractfile(member) for member in archive if member.isfile())
        waiting = enumerate(json.load(file) for file in files if file is not None)
        agenda: list[tuple[float, int, int, Iterator[tuple[float, dict[str, Any]]], dict[str, Any]]] = []

        def begin(now: float) -> None:
            number, conversation = next(waiting, (0, None))
            if conversation is not None:
                _schedule(agenda, now, number, 0, iter(_requests(conversation["requests"])))

        for _ in range(conversations):
            begin(0.0)
        while agenda:
            at, number, count, rest, record = heapq.heappop(agenda)
            start = at - record["at"]
            if not _schedule(agenda, start, number, count + 1, rest):
                begin(at)
            per_page = MOONCAKE_PAGE // 64
            ids = record["hash_ids"][per_page - 1 : record["in"] // MOONCAKE_PAGE * per_page : per_page]
            pages = [numbers.setdefault((number, record["model"], each), len(numbers)) for each in ids]
            yield Arrival(pages, record["in"])


def _schedule(agenda: list[Any], start: float, number: int, count: int, rest: Iterator[tuple[float, Any]]) -> bool:
    """Put a conversation's next request on the agenda; False when there is none."""
    for at, record in rest:
        heapq.heappush(agenda, (start + at, number, count, rest, record | {"at": at}))
        return True
    return False


def _requests(requests: list[dict[str, Any]]) -> list[tuple[float, dict[str, Any]]]:
    """Requests with their seconds since the conversation's start, those of sub-agents among them."""
    found = []
    for record in requests:
        if "requests" in record:
            found += [(record["t"] + at, nested) for at, nested in _requests(record["requests"])]
        elif record["in"] > 0:
            found.append((record["t"], record))
    return sorted(found, key=lambda pair: pair[0])
