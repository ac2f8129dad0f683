"""Pages that somebody is computing or fetching right now, so that nobody else does it too."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from moonpool_worker.engine.request import Request


class InFlight:
    """Links of pages, and the request that each is expected from: the first that claimed it."""

    def __init__(self) -> None:
        self._owners: dict[bytes, Request] = {}

    def __len__(self) -> int:
        return len(self._owners)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._owners

    def claim(self, request: Request, digests: Iterable[bytes]) -> None:
        for digest in digests:
            if self._owners.setdefault(digest, request) is request:
                request.claims.add(digest)

    def release(self, request: Request, digests: Iterable[bytes]) -> None:
        """The request has them, or gives up on them."""
        for digest in digests:
            if digest in request.claims:
                request.claims.discard(digest)
                del self._owners[digest]

    def release_all(self, request: Request) -> None:
        for digest in request.claims:
            del self._owners[digest]
        request.claims.clear()

    def first_run(self, request: Request, chain: Sequence[bytes], start: int, stop: int) -> int:
        """The end of the run of others' pages that begins at ``start``; ``start`` when there is none."""
        position = start
        while position < stop and self._is_anothers(request, chain[position]):
            position += 1
        return position

    def last(self, request: Request, chain: Sequence[bytes], start: int, stop: int) -> tuple[int, Request] | None:
        """The last page of ``chain[start:stop]`` that another computes: the number behind it, and who that is."""
        for position in range(stop - 1, start - 1, -1):
            if self._is_anothers(request, chain[position]):
                return position + 1, self._owners[chain[position]]
        return None

    def _is_anothers(self, request: Request, digest: bytes) -> bool:
        owner = self._owners.get(digest)
        return owner is not None and owner is not request
