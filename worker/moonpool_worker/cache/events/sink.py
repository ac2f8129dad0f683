"""What the cache core tells about residency. One page of one group of one tier at a time, cheap to call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

#: What L3 holds is not told: its store evicts without a word to anybody.
Tier = Literal["l1", "l2"]


class CacheEventSink(Protocol):
    """All calls come from the engine's thread and none of them blocks.

    A page is named by its link of the hash chain (32 bytes). ``group`` is the number of the cache group; a group has a
    page when it has all blocks of it (a state group: the checkpoint at its end).
    """

    def described(self, links: Sequence[bytes], parent: bytes | None, token_ids: Sequence[int], salt: bytes) -> None:
        """Links just computed from a text: ``links[i]`` is that of ``token_ids[i * P:(i + 1) * P]``.

        The predecessor of ``links[0]`` is ``parent``, None at the start of a text. Says nothing about residency.
        """
        ...

    def stored(self, tier: Tier, group: int, link: bytes, reason: str) -> None:
        """The group has the page in the tier, where it had it not. ``reason``: computed, copied, fetched, restored."""
        ...

    def removed(self, tier: Tier, group: int, link: bytes, reason: str) -> None:
        """The group has the page in the tier no more. ``reason``: capacity, flush, mismatch."""
        ...

    def flush(self) -> None:
        """A step is over: what happened since the last call may be sent. Nothing happened: nothing is sent."""
        ...
